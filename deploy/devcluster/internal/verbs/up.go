package verbs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/process"
	"zerotrain.dev/devcluster/internal/supervisor"
)

type upOptions struct {
	*common
	settings instance.Settings
	profile  string
	keep     bool
}

func upCommand(flags *common) *cobra.Command {
	options := upOptions{common: flags}
	command := &cobra.Command{
		Use:   "up",
		Short: "Start a cluster and wait until it is Ready (one that runs already is left as it is)",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return options.run() },
	}
	set := command.Flags()
	set.StringVar(&options.profile, "profile", string(instance.ControlPlane), "control-plane, simulated or node")
	set.StringVar(&options.settings.BinDir, "bin-dir", "", "folder of the other tools (kwok, containerd, ...); default: beside this program")
	set.StringArrayVar(&options.settings.Images, "image", nil, "docker-archive to load into the node (may be repeated)")
	set.IntVar(&options.settings.NumNodes, "nodes", 4, "number of simulated nodes")
	set.IntVar(&options.settings.GPUsPerNode, "gpus-per-node", 8, "nvidia.com/gpu of each simulated node")
	set.StringVar(&options.settings.FeatureGates, "feature-gates", "", "feature gates of every component: A=true,B=false")
	set.StringVar(&options.settings.RuntimeConfig, "runtime-config", "", "API groups to switch on: group/version=true")
	set.IntVar(&options.settings.OwnerPID, "owner-pid", 0, "stop and remove the instance when this process ends (for tests)")
	set.BoolVar(&options.keep, "keep", false, "after a failed start leave the instance's folder, for its logs")
	return command
}

func (o *upOptions) run() error {
	inst, err := o.instance()
	if err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	lock, err := inst.Lock()
	if errors.Is(err, instance.ErrLocked) {
		return o.alreadyUp(inst)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	started := time.Now()
	if err := o.prepare(inst); err != nil {
		defer inst.Unlock(lock)
		return errors.Join(err, inst.Remove())
	}
	if err := launch(inst, lock); err != nil {
		defer inst.Unlock(lock)
		return o.giveUp(inst, err)
	}
	fmt.Printf("cluster %s (%s) is Ready after %.1f s\nexport KUBECONFIG=%s\n",
		inst.Name, o.settings.Profile, time.Since(started).Seconds(), inst.Kubeconfig())
	return nil
}

// check refuses what cannot work before anything is written.
func (o *upOptions) check() error {
	o.settings.Profile = instance.Profile(o.profile)
	if !slices.Contains(instance.Profiles, o.settings.Profile) {
		return fmt.Errorf("--profile %q: must be one of %v", o.profile, instance.Profiles)
	}
	if o.settings.NumNodes < 1 || o.settings.GPUsPerNode < 0 {
		return fmt.Errorf("--nodes %d --gpus-per-node %d: at least one node, and no negative number of GPUs",
			o.settings.NumNodes, o.settings.GPUsPerNode)
	}
	if o.settings.BinDir == "" {
		o.settings.BinDir = invokedFrom()
	}
	var err error
	if o.settings.BinDir, err = filepath.Abs(o.settings.BinDir); err != nil {
		return err
	}
	for i, image := range o.settings.Images {
		if o.settings.Images[i], err = filepath.Abs(image); err != nil {
			return err
		}
		if _, err := os.Stat(image); err != nil {
			return fmt.Errorf("--image: %w; build it first", err)
		}
	}
	return supervisor.CheckTools(o.settings)
}

// alreadyUp waits for a start that someone else has begun, if it is still under way.
func (o *upOptions) alreadyUp(inst instance.Instance) error {
	const patience, period = 120 * time.Second, 100 * time.Millisecond
	control := supervisor.NewControl(inst)
	for deadline := time.Now().Add(patience); control.Ready() != nil; time.Sleep(period) {
		if !inst.IsRunning() {
			return fmt.Errorf("cluster %s has just been stopped, or failed to start; run the command again", inst.Name)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("cluster %s is being started by someone else and not Ready after %s; see %s",
				inst.Name, patience, inst.Log("supervisor"))
		}
	}
	settings, err := inst.ReadSettings()
	if err != nil {
		return err
	}
	if settings.Profile != o.settings.Profile {
		return fmt.Errorf("cluster %s is running with --profile %s, not %s; stop it first (devcluster down --name %s) or take another --name",
			inst.Name, settings.Profile, o.settings.Profile, inst.Name)
	}
	fmt.Printf("cluster %s (%s) is running already\nexport KUBECONFIG=%s\n", inst.Name, settings.Profile, inst.Kubeconfig())
	return nil
}

// prepare writes the folder. What an instance that was killed has left is removed first.
func (o *upOptions) prepare(inst instance.Instance) error {
	if err := supervisor.CleanUp(inst); err != nil {
		return err
	}
	ports, err := instance.PickPorts()
	if err != nil {
		return err
	}
	o.settings.Ports = ports
	if err := supervisor.Adapt(inst, &o.settings, func(note string) { fmt.Println("note: " + note) }); err != nil {
		return err
	}
	if err := inst.Create(o.settings); err != nil {
		return err
	}
	return controlplane.Prepare(inst, o.settings)
}

// launch starts the daemon and follows it until the cluster is ready. Ctrl-C ends both.
func launch(inst instance.Instance, lock *os.File) error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	program, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(inst.Log("supervisor"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	daemon := exec.Command(program, "supervise", "--root", inst.Root, "--name", inst.Name)
	daemon.Dir = "/" // the daemon must not pin the caller's folder
	daemon.Stdout, daemon.Stderr = log, log
	daemon.ExtraFiles = []*os.File{write, lock}
	daemon.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // outlives the caller's shell and terminal
	if err := daemon.Start(); err != nil {
		return err
	}
	write.Close()
	wasInterrupted := forwardInterrupts(daemon.Process)
	err = supervisor.Follow(read, func(line string) { fmt.Println("  " + line) })
	if err != nil {
		daemon.Wait() //nolint:errcheck // its error has come through the pipe
	}
	if wasInterrupted() && err != nil {
		return errors.New("interrupted")
	}
	return err
}

// forwardInterrupts ends the daemon, too, when the person at `up` gives up.
func forwardInterrupts(daemon *os.Process) (wasInterrupted func() bool) {
	var seen atomic.Bool
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		for range interrupts {
			seen.Store(true)
			daemon.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended
		}
	}()
	return seen.Load
}

func (o *upOptions) giveUp(inst instance.Instance, failure error) error {
	text := strings.TrimRight(failure.Error(), "\n")
	if tail := process.Tail(inst.Log("supervisor"), 6); strings.Contains(text, "supervisor ended") && len(tail) > 0 {
		text += "\n  | " + strings.Join(tail, "\n  | ")
	}
	if o.keep {
		return fmt.Errorf("cluster %s did not start.\n%s\nThe folder is left for you: %s (devcluster down --name %s removes it)",
			inst.Name, text, inst.Dir(), inst.Name)
	}
	if err := supervisor.CleanUp(inst); err != nil {
		text += "\nand cleaning up failed: " + err.Error()
	}
	return fmt.Errorf("cluster %s did not start; everything it had started is stopped and removed.\n%s", inst.Name, text)
}
