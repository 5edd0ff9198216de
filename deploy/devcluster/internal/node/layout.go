// Package node makes one real node: kubelet, containerd, runc, bridge CNI, kube-proxy and CoreDNS, in namespaces of its own.
//
// Three processes take part. The supervisor that `up` started stays outside, holds the host's port and relays it (Outside). It clones the
// first process of new mount, PID and network namespaces (Init), which builds their contents and starts the supervisor inside. Ending the
// first process ends all, and with the namespaces go the mounts and links; only cgroups need removing.
package node

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"

	"zerotrain.dev/devcluster/internal/instance"
)

const (
	// Inside is where the instance's folder is mounted in the node's namespaces: short, as sockets need, and the same for all.
	Inside = "/run/devcluster"

	apiSocket        = "api.sock" // in the instance's folder: the door between the two networks
	containerdSocket = Inside + "/containerd.sock"

	gatewayIP = "10.99.0.1"
	podCIDR   = "10.244.0.0/16"
)

func inside(part ...string) string { return filepath.Join(append([]string{Inside}, part...)...) }

// CgroupName is the instance's group in every hierarchy. Two kubelets with the same root would kill each other's pods, and two clones of
// the repository may both call their instance "dev".
func CgroupName(inst instance.Instance) string {
	sum := sha256.Sum256([]byte(inst.Root))
	return "devcluster-" + inst.Name + "-" + hex.EncodeToString(sum[:4])
}
