package node

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strings"

	"zerotrain.dev/devcluster/internal/instance"
)

// The API server's port inside: the network is private, so nothing else can have taken it.
const apiPortInside = 6443

// Adapt settles how the node runs on this machine, and tells what will be missing.
func Adapt(inst instance.Instance, settings *instance.Settings, tell func(string)) error {
	settings.Ports.APIInside = apiPortInside
	settings.UserMode = os.Getuid() != 0 || !hasUser(podUser)
	if err := checkMachine(inst, *settings); err != nil {
		return err
	}
	if settings.UserMode {
		tell("not (fully) root: the node runs in a user namespace; pods have no CPU or memory limits, no seccomp, and one user id")
	}
	settings.HasNft = hasNft()
	if !settings.HasNft {
		tell("no nft program: kube-proxy is left out; headless Services, DNS and kubernetes.default work, other Service addresses do not " +
			"(Debian, Ubuntu: apt install nftables)")
	}
	return nil
}

// hasUser tells whether a user id means anything here: root of a small user namespace has few of them, and is no more than an ordinary user.
func hasUser(id int) bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(text)) {
		var first, outside, count int
		if _, err := fmt.Sscan(line, &first, &outside, &count); err == nil && id >= first && id-first < count {
			return true
		}
	}
	return false
}

// hasNft looks where system programs are, too: an ordinary user's PATH often lacks them.
func hasNft() bool {
	for _, path := range []string{"nft", "/usr/sbin/nft", "/sbin/nft"} {
		if _, err := exec.LookPath(path); err == nil {
			return true
		}
	}
	return false
}

// Settings by which distributions forbid user namespaces to ordinary users, the value that forbids, and the way out.
var userNamespaceGates = []struct{ path, forbids, wayOut string }{
	{"/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"},
	{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"},
	{"/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"},
}

// ErrUnsupported is the way `up` says that this machine cannot run the profile at all, as opposed to a start that failed.
type ErrUnsupported struct{ Reason string }

func (e *ErrUnsupported) Error() string { return e.Reason }

func checkUserNamespaces() error {
	for _, gate := range userNamespaceGates {
		value, err := os.ReadFile(gate.path)
		if err == nil && strings.TrimSpace(string(value)) == gate.forbids {
			return &ErrUnsupported{fmt.Sprintf("--profile node as %s needs unprivileged user namespaces, and this machine forbids them (%s is %s). "+
				"Ways out: as root, %s; or run this command as root; or use --profile control-plane or simulated, which need neither",
				userName(), gate.path, gate.forbids, gate.wayOut)}
		}
	}
	return nil
}

func userName() string {
	if who, err := user.Current(); err == nil {
		return who.Username
	}
	return fmt.Sprintf("user %d", os.Getuid())
}
