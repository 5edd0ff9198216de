package node

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"

	"zerotrain.dev/devcluster/internal/instance"
)

// ProbeVerb is the hidden command that runs Probe.
const ProbeVerb = "node-probe"

// Probe does, in fresh namespaces, one of each kind of thing that Init will need. Nothing of it outlives the process.
func Probe() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mounting a tmpfs: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mounting /proc (a container whose /proc is masked does not allow it): %w", err)
	}
	return buildNetwork()
}

// checkMachine tries what the node needs before anything of the instance exists. The error is *ErrUnsupported.
func checkMachine(inst instance.Instance, settings instance.Settings) error {
	if settings.UserMode {
		if err := checkUserNamespaces(); err != nil {
			return err
		}
	} else if err := errors.Join(createCgroups(inst), RemoveCgroups(inst)); err != nil {
		return &ErrUnsupported{err.Error()}
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	probe := exec.Command(program, ProbeVerb)
	probe.SysProcAttr = namespaces(settings)
	output, err := probe.CombinedOutput()
	if err == nil {
		return nil
	}
	reason := strings.TrimSpace(string(output))
	if reason == "" {
		reason = err.Error()
	}
	wayOut := "run this command as root"
	if !settings.UserMode {
		wayOut = "in a container, run that with --privileged"
	}
	return &ErrUnsupported{fmt.Sprintf("--profile node cannot make its namespaces on this machine as %s: %s. Ways out: %s; or use --profile "+
		"control-plane or simulated, which need none", userName(), strings.TrimPrefix(reason, "devcluster: "), wayOut)}
}
