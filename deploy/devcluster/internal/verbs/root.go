// Package verbs is the command line of the supervisor: up, down, status, kubeconfig, load-image, stop-component, start-component.
//
// main calls Execute when the program was not started under a component's name.
package verbs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/node"
)

// exitUnsupported: this machine cannot run the profile, and trying again will not help. Tests skip on it.
const exitUnsupported = 3

// common holds the flags that every verb has.
type common struct{ root, name string }

func (c common) instance() (instance.Instance, error) { return instance.New(c.root, c.name) }

// running returns the instance if a supervisor holds it.
func (c common) running() (instance.Instance, error) {
	inst, err := c.instance()
	if err == nil && !inst.IsRunning() {
		err = fmt.Errorf("no cluster %q is running under %s; start it with: devcluster up --name %s --root %s",
			c.name, inst.Root, c.name, c.root)
	}
	return inst, err
}

// Execute runs one verb and returns the exit status. components are the names that main handles itself.
func Execute(components []string) int {
	var flags common
	root := &cobra.Command{
		Use:   "devcluster",
		Short: "A real Kubernetes on one Linux machine, without Docker and without an image registry",
		Long: "A real Kubernetes on one Linux machine, without Docker and without an image registry.\n\n" +
			"The same program is every component of it: devcluster COMPONENT [flags], where COMPONENT is\n" +
			strings.Join(components, ", ") + ".",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.PersistentFlags().StringVar(&flags.root, "root", "build/devcluster/instances", "folder that holds the instances")
	root.PersistentFlags().StringVar(&flags.name, "name", "dev", "name of the instance")
	root.AddCommand(
		upCommand(&flags), downCommand(&flags), statusCommand(&flags), kubeconfigCommand(&flags),
		loadImageCommand(&flags), stopComponentCommand(&flags), startComponentCommand(&flags), superviseCommand(&flags),
		nodeInitCommand(&flags), nodeProbeCommand(), withoutChownCommand(),
	)
	if err := root.Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "devcluster: %s\n", strings.TrimRight(err.Error(), "\n"))
		if unsupported := (*node.ErrUnsupported)(nil); errors.As(err, &unsupported) {
			return exitUnsupported
		}
		return 1
	}
	return 0
}

// invokedFrom is the folder under which the person called the program. It may be a link into a cache, beside which the other tools are
// not; so the name it was called by comes before what it resolves to.
func invokedFrom() string {
	if strings.ContainsRune(os.Args[0], filepath.Separator) {
		if absolute, err := filepath.Abs(os.Args[0]); err == nil {
			return filepath.Dir(absolute)
		}
	}
	executable, err := os.Executable()
	if err != nil {
		return "."
	}
	return filepath.Dir(executable)
}
