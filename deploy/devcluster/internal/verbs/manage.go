package verbs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/supervisor"
)

const shutdownTimeout = 60 * time.Second

func downCommand(flags *common) *cobra.Command {
	var all bool
	command := &cobra.Command{
		Use:   "down",
		Short: "Stop a cluster and remove everything it made (nothing to do is no error)",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			names := []string{flags.name}
			if all {
				var err error
				if names, err = instance.List(flags.root); err != nil {
					return err
				}
			}
			var errs []error
			for _, name := range names {
				errs = append(errs, down(common{root: flags.root, name: name}))
			}
			return errors.Join(errs...)
		},
	}
	command.Flags().BoolVar(&all, "all", false, "every instance under --root")
	return command
}

func down(flags common) error {
	inst, err := flags.instance()
	if err != nil {
		return err
	}
	if !inst.Exists() && !inst.IsRunning() {
		fmt.Printf("cluster %s is not running\n", inst.Name)
		return nil
	}
	lock, err := stopAndLock(inst)
	if err != nil {
		return err
	}
	defer inst.Unlock(lock)
	if err := supervisor.CleanUp(inst); err != nil {
		return fmt.Errorf("cluster %s has stopped, but not all of it could be removed: %w", inst.Name, err)
	}
	fmt.Printf("cluster %s is stopped and removed\n", inst.Name)
	return nil
}

// stopAndLock asks the supervisor to end and waits until the kernel has given the instance's lock back.
func stopAndLock(inst instance.Instance) (*os.File, error) {
	deadline := time.Now().Add(shutdownTimeout)
	asked := false
	for {
		lock, err := inst.Lock()
		if err == nil || !errors.Is(err, instance.ErrLocked) {
			return lock, err
		}
		if !asked {
			// It may be too early (no socket yet) or too late; then the next round sees it.
			asked = supervisor.NewControl(inst).Shutdown() == nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("cluster %s has not stopped within %s; its supervisor's log is %s",
				inst.Name, shutdownTimeout, inst.Log("supervisor"))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func statusCommand(flags *common) *cobra.Command {
	var asJSON bool
	command := &cobra.Command{
		Use:   "status",
		Short: "List the instances under --root and their components",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			names, err := instance.List(flags.root)
			if err != nil {
				return err
			}
			if command.Flags().Changed("name") {
				names = []string{flags.name}
			}
			return printStatus(flags.root, names, asJSON)
		},
	}
	command.Flags().BoolVar(&asJSON, "json", false, "one JSON object per instance")
	return command
}

func printStatus(root string, names []string, asJSON bool) error {
	table := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	defer table.Flush()
	if !asJSON {
		fmt.Fprintln(table, "INSTANCE\tPROFILE\tCOMPONENT\tSTATE\tPID\tRESTARTS\tLAST EXIT")
	}
	for _, name := range names {
		inst, err := instance.New(root, name)
		if err != nil {
			return err
		}
		settings, err := inst.ReadSettings()
		if err != nil {
			return fmt.Errorf("no cluster %q under %s", name, inst.Root)
		}
		components, err := supervisor.NewControl(inst).Status()
		if asJSON {
			line := map[string]any{"name": name, "settings": settings, "running": err == nil, "components": components}
			if err := json.NewEncoder(os.Stdout).Encode(line); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			fmt.Fprintf(table, "%s\t%s\t-\tnot running (devcluster down --name %s removes its folder)\n", name, settings.Profile, name)
		}
		for _, c := range components {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%d\t%d\t%s\n", name, settings.Profile, c.Name, c.State, c.PID, c.Restarts, c.LastExit)
		}
	}
	return nil
}

func kubeconfigCommand(flags *common) *cobra.Command {
	return &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the path of the instance's kubeconfig",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			inst, err := flags.running()
			if err == nil {
				fmt.Println(inst.Kubeconfig())
			}
			return err
		},
	}
}

func loadImageCommand(flags *common) *cobra.Command {
	return &cobra.Command{
		Use:   "load-image TAR",
		Short: "Load a docker-archive into the node's containerd",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			inst, err := flags.running()
			if err != nil {
				return err
			}
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			if _, err := os.Stat(path); err != nil {
				return err
			}
			return supervisor.NewControl(inst).LoadImage(path)
		},
	}
}

func stopComponentCommand(flags *common) *cobra.Command {
	var name string
	var kill bool
	command := &cobra.Command{
		Use:   "stop-component",
		Short: "Stop one component of a running cluster and keep it stopped",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			inst, err := flags.running()
			if err != nil {
				return err
			}
			return supervisor.NewControl(inst).StopComponent(name, kill)
		},
	}
	command.Flags().StringVar(&name, "component", "", "its name, as status shows it")
	command.Flags().BoolVar(&kill, "kill", false, "SIGKILL at once instead of SIGTERM")
	command.MarkFlagRequired("component") //nolint:errcheck // the flag is defined above
	return command
}

func startComponentCommand(flags *common) *cobra.Command {
	var name string
	command := &cobra.Command{
		Use:   "start-component",
		Short: "Start a component that was stopped, and wait until it serves",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			inst, err := flags.running()
			if err != nil {
				return err
			}
			return supervisor.NewControl(inst).StartComponent(name)
		},
	}
	command.Flags().StringVar(&name, "component", "", "its name, as status shows it")
	command.MarkFlagRequired("component") //nolint:errcheck // the flag is defined above
	return command
}
