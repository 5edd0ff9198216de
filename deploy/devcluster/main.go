// One program is a whole Kubernetes control plane, kubelet and kubectl, and the supervisor that runs them: the first argument says which,
// or the name under which it is called (a link named kubectl is kubectl).
package main

import (
	"os"
	"path/filepath"

	"zerotrain.dev/devcluster/internal/components"
	"zerotrain.dev/devcluster/internal/node"
	"zerotrain.dev/devcluster/internal/verbs"
)

func main() {
	if filepath.Base(os.Args[0]) == node.ShimName {
		os.Exit(node.RunShim())
	}
	if run := components.Lookup(filepath.Base(os.Args[0])); run != nil {
		os.Exit(run())
	}
	if len(os.Args) > 1 {
		if run := components.Lookup(os.Args[1]); run != nil {
			os.Args = os.Args[1:]
			os.Exit(run())
		}
	}
	os.Exit(verbs.Execute(components.Names()))
}
