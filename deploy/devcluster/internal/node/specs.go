package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/fakechown"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/process"
	"zerotrain.dev/devcluster/internal/unixsocket"
)

// Node knows how to run the components of the node, from inside its namespaces.
type Node struct {
	Instance instance.Instance
	Settings instance.Settings
	Program  string
}

// Components that change owners of files, which fails where there is one user id.
var changesOwners = map[string]bool{"kubelet": true, "containerd": true}

func (n Node) spec(name string, probe func(context.Context) error, argv ...string) process.Spec {
	if n.Settings.UserMode && changesOwners[name] {
		argv = append([]string{n.Program, fakechown.Verb}, argv...)
	}
	return process.Spec{
		Name: name, Argv: argv, LogPath: n.Instance.Log(name), Ready: probe,
		StartTimeout: 90 * time.Second, StopGrace: 3 * time.Second,
	}
}

// Prepare writes the configuration files and opens the door to the API for the process outside.
func (n Node) Prepare() error {
	if err := writeConfig(n.Instance, n.Settings, n.Program); err != nil {
		return err
	}
	door, err := unixsocket.Listen(n.Instance.Path(apiSocket))
	if err != nil {
		return err
	}
	go n.relayAPI(door)
	return nil
}

// Containerd needs nothing but the machine; it starts beside the control plane.
func (n Node) Containerd() process.Spec {
	return n.spec("containerd", probeUnix(containerdSocket),
		filepath.Join(n.Settings.BinDir, "containerd"), "--config", inside("config", "containerd.toml"), "--log-level", "warn")
}

// Components are what needs the API server.
func (n Node) Components() []process.Spec {
	specs := []process.Spec{n.Kubelet(), n.CoreDNS()}
	if n.Settings.HasNft {
		specs = append(specs, n.KubeProxy())
	}
	return specs
}

// Kubelet is ready when it answers; the node follows a moment later.
func (n Node) Kubelet() process.Spec {
	return n.spec("kubelet", probeHTTP("http://127.0.0.1:10248/healthz"),
		n.Program, "kubelet",
		"--config="+inside("config", "kubelet.yaml"), "--kubeconfig="+inside("config", "kubelet.kubeconfig"),
		"--root-dir="+inside("data", "kubelet"), "--cert-dir="+inside("data", "kubelet-pki"),
		"--hostname-override="+controlplane.NodeName, "--node-ip="+controlplane.NodeIP,
		"--node-labels=topology.kubernetes.io/region=region-1,topology.kubernetes.io/zone=zone-a")
}

// KubeProxy makes Services' addresses work. It needs the nft program.
func (n Node) KubeProxy() process.Spec {
	argv := []string{n.Program, "kube-proxy",
		"--kubeconfig=" + inside("config", "kube-proxy.kubeconfig"), "--hostname-override=" + controlplane.NodeName,
		"--proxy-mode=nftables", "--cluster-cidr=" + podCIDR,
		// Limits of connection tracking are the machine's, not this network's.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
		"--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249",
	}
	if !bridgesAreFiltered() {
		// Answers of a pod on the same bridge would not pass the rules that undo the rewriting; with our source address they come back here.
		argv = append(argv, "--masquerade-all")
	}
	if n.Settings.FeatureGates != "" {
		argv = append(argv, "--feature-gates="+n.Settings.FeatureGates)
	}
	return n.spec("kube-proxy", probeHTTP("http://127.0.0.1:10256/livez"), argv...)
}

// bridgesAreFiltered: the kernel module br_netfilter is there and on, so that packets between pods of one bridge meet the rules.
func bridgesAreFiltered() bool {
	value, err := os.ReadFile("/proc/sys/net/bridge/bridge-nf-call-iptables")
	return err == nil && strings.TrimSpace(string(value)) == "1"
}

// CoreDNS listens on an address of the service network that is put on the loopback link: no Service, no rule is needed to reach it.
func (n Node) CoreDNS() process.Spec {
	return n.spec("coredns", probeHTTP("http://127.0.0.1:8181/ready"),
		filepath.Join(n.Settings.BinDir, "coredns"), "-conf", inside("config", "Corefile"))
}

func probeUnix(path string) func(context.Context) error {
	return func(ctx context.Context) error {
		var dialer net.Dialer
		connection, err := dialer.DialContext(ctx, "unix", path)
		if err == nil {
			connection.Close()
		}
		return err
	}
}

func probeHTTP(url string) func(context.Context) error {
	client := &http.Client{Timeout: 2 * time.Second}
	return func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			return err
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: HTTP %d", url, answer.StatusCode)
		}
		return nil
	}
}
