// Package controlplane writes what the four programs of a control plane need, and says how to run them.
package controlplane

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/kube"
	"zerotrain.dev/devcluster/internal/pki"
)

// Addresses of the node profile's private network. The other profiles use 127.0.0.1 alone.
const (
	NodeIP    = "10.99.0.2"
	ServiceIP = "10.96.0.1" // of the Service default/kubernetes: the first of ServiceCIDR
	DNSIP     = "10.96.0.10"

	ServiceCIDR = "10.96.0.0/16"
	NodeName    = "node"
)

type identity struct {
	file    string
	subject pki.Subject
	client  bool // gets a kubeconfig of its own
}

var identities = []identity{
	{file: "etcd", subject: pki.Subject{CommonName: "etcd", Hosts: []string{"127.0.0.1", "localhost"}}},
	{file: "apiserver", subject: pki.Subject{CommonName: "kube-apiserver", Hosts: []string{
		"127.0.0.1", "::1", NodeIP, ServiceIP, "localhost",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}}},
	{file: "apiserver-kubelet-client", subject: pki.Subject{CommonName: "kube-apiserver-kubelet-client", Organization: "system:masters"}},
	{file: "components", subject: pki.Subject{CommonName: "components", Hosts: []string{"127.0.0.1", "localhost"}}},
	{file: "supervisor", subject: pki.Subject{CommonName: "devcluster-supervisor", Organization: "system:masters"}, client: true},
	{file: "controller-manager", subject: pki.Subject{CommonName: "system:kube-controller-manager"}, client: true},
	{file: "scheduler", subject: pki.Subject{CommonName: "system:kube-scheduler"}, client: true},
	{file: "kube-proxy", subject: pki.Subject{CommonName: "system:kube-proxy"}, client: true},
	{file: "coredns", subject: pki.Subject{CommonName: "system:coredns"}, client: true},
	{file: "kubelet", subject: pki.Subject{
		CommonName: "system:node:" + NodeName, Organization: "system:nodes", Hosts: []string{NodeName, NodeIP, "127.0.0.1"},
	}, client: true},
}

// Prepare makes the instance's authority, certificates, admin token and kubeconfigs. Called once, before anything runs.
func Prepare(inst instance.Instance, settings instance.Settings) error {
	authority, err := pki.NewAuthority(inst.Path("certs"), "devcluster-"+inst.Name)
	if err != nil {
		return err
	}
	for _, who := range identities {
		if err := authority.Issue(who.file, who.subject); err != nil {
			return err
		}
		if !who.client {
			continue
		}
		if err := writeKubeconfig(inst, who.file, settings.Ports.APIInside); err != nil {
			return err
		}
	}
	if err := authority.IssueKey("service-accounts"); err != nil {
		return err
	}
	return writeAdmin(inst, settings)
}

// ComponentKubeconfig is the kubeconfig under which a component (by its certificate's name) talks to the API server.
func ComponentKubeconfig(inst instance.Instance, name string) string {
	return inst.Path("config", name+".kubeconfig")
}

func writeKubeconfig(inst instance.Instance, name string, port int) error {
	return kube.WriteKubeconfig(ComponentKubeconfig(inst, name), kube.Access{
		Name:     inst.Name,
		Server:   fmt.Sprintf("https://127.0.0.1:%d", port),
		CAPath:   inst.Certs("ca.crt"),
		CertPath: inst.Certs(name + ".crt"),
		KeyPath:  inst.Certs(name + ".key"),
	})
}

// writeAdmin gives the person at the host a token: it works with kubectl, with curl and with every client library.
func writeAdmin(inst instance.Instance, settings instance.Settings) error {
	secret := make([]byte, 32)
	if _, err := rand.Read(secret); err != nil {
		return err
	}
	token := hex.EncodeToString(secret)
	if err := os.WriteFile(inst.Certs("token"), []byte(token), 0o600); err != nil {
		return err
	}
	line := token + `,admin,admin,"system:masters"` + "\n"
	if err := os.WriteFile(inst.Certs("tokens.csv"), []byte(line), 0o600); err != nil {
		return err
	}
	return kube.WriteKubeconfig(inst.Kubeconfig(), kube.Access{
		Name:   inst.Name,
		Server: fmt.Sprintf("https://127.0.0.1:%d", settings.Ports.API),
		CAPath: inst.Certs("ca.crt"),
		Token:  token,
	})
}
