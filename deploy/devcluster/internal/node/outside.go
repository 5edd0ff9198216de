package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/relay"
	"zerotrain.dev/devcluster/internal/unixsocket"
)

// InitVerb is the hidden command that runs Init.
const InitVerb = "node-init"

// Outside runs a node to its end: cgroups, namespaces, and the port of the host through which clients reach the API. pass are open
// files for the first process, from file descriptor 3 on. ended is closed when the owner of the instance has gone.
func Outside(inst instance.Instance, settings instance.Settings, program string, ended <-chan struct{}, pass ...*os.File) error {
	if !settings.UserMode {
		if err := createCgroups(inst); err != nil {
			return errors.Join(err, RemoveCgroups(inst))
		}
		defer RemoveCgroups(inst) //nolint:errcheck // `down` tries again and reports
	}
	port, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", settings.Ports.API))
	if err != nil {
		return err
	}
	defer port.Close()
	go relay.Serve(port, func(ctx context.Context) (net.Conn, error) { return unixsocket.Dial(ctx, inst.Path(apiSocket)) })
	first := exec.Command(program, InitVerb, "--root", inst.Root, "--name", inst.Name)
	first.Stdout, first.Stderr = os.Stdout, os.Stderr
	first.ExtraFiles = pass
	first.SysProcAttr = namespaces(settings)
	if err := first.Start(); err != nil {
		return fmt.Errorf("making namespaces: %w; run as root (in a container: --privileged), or use --profile control-plane", err)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		select {
		case <-stop:
		case <-ended:
		}
		first.Process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
	}()
	if err := first.Wait(); err != nil {
		return fmt.Errorf("the node's first process: %w", err)
	}
	return nil
}

func namespaces(settings instance.Settings) *syscall.SysProcAttr {
	attributes := &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL, // killing this process ends the node, and nothing else is needed
	}
	if settings.UserMode {
		attributes.Cloneflags |= syscall.CLONE_NEWUSER
		attributes.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attributes.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return attributes
}
