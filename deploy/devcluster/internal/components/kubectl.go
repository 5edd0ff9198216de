package components

import (
	"os"

	_ "k8s.io/client-go/plugin/pkg/client/auth" // credential plugins of foreign kubeconfigs
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func runKubectl() int {
	// kubectl reads its verbosity before cobra does, since plugins and .kuberc are handled while the command tree is built.
	logs.GlogSetter(cmd.GetLogVerbosity(os.Args)) //nolint:errcheck // a bad value is reported again by the flag parser
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
	return 0
}
