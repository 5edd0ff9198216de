package controlplane

import (
	"context"
	"fmt"
	"time"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/kube"
	"zerotrain.dev/devcluster/internal/process"
)

// Plan knows how to run the control plane of one instance. Program is this executable: components are started under their own names.
type Plan struct {
	Instance instance.Instance
	Settings instance.Settings
	Program  string
}

// Client talks to the API server with full rights, from beside it.
func (p Plan) Client() (*kube.Client, error) {
	return p.client(p.Settings.Ports.APIInside)
}

func (p Plan) client(port int) (*kube.Client, error) {
	certs := p.Instance.Certs
	base := fmt.Sprintf("https://127.0.0.1:%d", port)
	return kube.NewClient(base, certs("ca.crt"), certs("supervisor.crt"), certs("supervisor.key"))
}

func (p Plan) spec(name string, probe func(context.Context) error, grace time.Duration, flags ...string) process.Spec {
	return process.Spec{
		Name:         name,
		Argv:         append([]string{p.Program, name}, flags...),
		LogPath:      p.Instance.Log(name),
		Ready:        probe,
		StartTimeout: 90 * time.Second, // seconds on an idle machine; a cold disk and two busy cores need their time
		StopGrace:    grace,
	}
}

func (p Plan) healthy(port int, path string) (func(context.Context) error, error) {
	client, err := p.client(port)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error { return client.Healthy(ctx, path) }, nil
}

// Etcd is the first wave. Data are as durable as the page cache: a development cluster does not outlive its machine.
func (p Plan) Etcd() (process.Spec, error) {
	ports, certs := p.Settings.Ports, p.Instance.Certs
	client := fmt.Sprintf("https://127.0.0.1:%d", ports.Etcd)
	peer := fmt.Sprintf("https://127.0.0.1:%d", ports.EtcdPeer)
	probe, err := p.healthy(ports.Etcd, "/health")
	return p.spec("etcd", probe, 5*time.Second,
		"--name=default",
		"--data-dir="+p.Instance.Path("data", "etcd"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
		"--cert-file="+certs("etcd.crt"), "--key-file="+certs("etcd.key"),
		"--client-cert-auth", "--trusted-ca-file="+certs("ca.crt"),
		"--peer-cert-file="+certs("etcd.crt"), "--peer-key-file="+certs("etcd.key"),
		"--peer-client-cert-auth", "--peer-trusted-ca-file="+certs("ca.crt"),
		"--unsafe-no-fsync", "--quota-backend-bytes=8589934592", "--snapshot-count=100000", "--log-level=warn",
	), err
}

// APIServer is the second wave.
func (p Plan) APIServer() (process.Spec, error) {
	ports, certs := p.Settings.Ports, p.Instance.Certs
	probe, err := p.healthy(ports.APIInside, "/readyz")
	flags := []string{
		fmt.Sprintf("--secure-port=%d", ports.APIInside),
		fmt.Sprintf("--etcd-servers=https://127.0.0.1:%d", ports.Etcd),
		"--etcd-cafile=" + certs("ca.crt"), "--etcd-certfile=" + certs("etcd.crt"), "--etcd-keyfile=" + certs("etcd.key"),
		"--cert-dir=" + p.Instance.Path("data", "kube-apiserver"),
		"--tls-cert-file=" + certs("apiserver.crt"), "--tls-private-key-file=" + certs("apiserver.key"),
		"--client-ca-file=" + certs("ca.crt"), "--token-auth-file=" + certs("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + certs("service-accounts.pub"),
		"--service-account-signing-key-file=" + certs("service-accounts.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-cluster-ip-range=" + ServiceCIDR,
		"--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000", "--profiling=false",
	}
	if p.Settings.Profile == instance.Node {
		flags = append(flags,
			"--bind-address=0.0.0.0", "--advertise-address="+NodeIP, // the namespace is private: no other host sees these
			"--kubelet-certificate-authority="+certs("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
			"--kubelet-client-certificate="+certs("apiserver-kubelet-client.crt"),
			"--kubelet-client-key="+certs("apiserver-kubelet-client.key"),
		)
	} else {
		flags = append(flags, "--bind-address=127.0.0.1", "--endpoint-reconciler-type=none", "--event-ttl=10m")
	}
	if p.Settings.RuntimeConfig != "" {
		flags = append(flags, "--runtime-config="+p.Settings.RuntimeConfig)
	}
	return p.spec("kube-apiserver", probe, 4*time.Second, p.gates(flags)...), err
}

// Controllers is the third wave: controller-manager and scheduler. Their client rates are those of a cluster with hundreds of nodes,
// since the defaults hold two cores at 55 pods per second.
func (p Plan) Controllers() ([]process.Spec, error) {
	ports, certs := p.Settings.Ports, p.Instance.Certs
	common := func(name string, port int) []string {
		return []string{
			"--kubeconfig=" + ComponentKubeconfig(p.Instance, name),
			"--authentication-kubeconfig=" + ComponentKubeconfig(p.Instance, name),
			"--authorization-kubeconfig=" + ComponentKubeconfig(p.Instance, name),
			fmt.Sprintf("--secure-port=%d", port), "--bind-address=127.0.0.1",
			"--tls-cert-file=" + certs("components.crt"), "--tls-private-key-file=" + certs("components.key"),
			"--leader-elect=false", "--profiling=false",
		}
	}
	managerFlags := append(common("controller-manager", ports.ControllerManager),
		"--controllers=*,-nodeipam,-cloud-node-lifecycle-controller,-service-lb-controller,-node-route-controller",
		"--use-service-account-credentials", "--root-ca-file="+certs("ca.crt"),
		"--service-account-private-key-file="+certs("service-accounts.key"),
		"--cluster-signing-cert-file="+certs("ca.crt"), "--cluster-signing-key-file="+certs("ca.key"),
		"--kube-api-qps=1000", "--kube-api-burst=2000", "--concurrent-job-syncs=20",
	)
	schedulerFlags := append(common("scheduler", ports.Scheduler),
		"--kube-api-qps=2000", "--kube-api-burst=4000", "--kube-api-content-type=application/vnd.kubernetes.protobuf",
	)
	managerProbe, err := p.managerReady()
	if err != nil {
		return nil, err
	}
	schedulerProbe, err := p.healthy(ports.Scheduler, "/healthz")
	return []process.Spec{
		p.spec("kube-controller-manager", managerProbe, 2*time.Second, p.gates(managerFlags)...),
		p.spec("kube-scheduler", schedulerProbe, 2*time.Second, p.gates(schedulerFlags)...),
	}, err
}

// managerReady waits for the default service account: before that, no pod can be created in the namespace "default".
func (p Plan) managerReady() (func(context.Context) error, error) {
	healthy, err := p.healthy(p.Settings.Ports.ControllerManager, "/healthz")
	if err != nil {
		return nil, err
	}
	client, err := p.Client()
	return func(ctx context.Context) error {
		if err := healthy(ctx); err != nil {
			return err
		}
		return client.Healthy(ctx, "/api/v1/namespaces/default/serviceaccounts/default")
	}, err
}

func (p Plan) gates(flags []string) []string {
	if p.Settings.FeatureGates == "" {
		return flags
	}
	return append(flags, "--feature-gates="+p.Settings.FeatureGates)
}
