// Package simulated makes nodes that exist only in the API: kwok plays their kubelets. For tests of scale, of scheduling and of what
// happens when ranks fail, where real containers would be too many or too well-behaved.
package simulated

import (
	_ "embed"
	"os"
	"path/filepath"
	"time"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/process"
)

// The life of simulated nodes and pods; the file documents the annotations that change it.
//
//go:embed stages.yaml
var stages []byte

// Spec writes the stage file and says how to run kwok.
func Spec(inst instance.Instance, settings instance.Settings) (process.Spec, error) {
	path := inst.Path("config", "stages.yaml")
	err := os.WriteFile(path, stages, 0o600)
	return process.Spec{
		Name: "kwok",
		Argv: []string{
			filepath.Join(settings.BinDir, "kwok"),
			"--kubeconfig=" + controlplane.ComponentKubeconfig(inst, "supervisor"),
			"--config=" + path,
			"--manage-all-nodes=false",
			"--manage-nodes-with-annotation-selector=" + managedAnnotation + "=fake",
			"--node-lease-duration-seconds=40",
			"--server-address=",
		},
		Env:          []string{"HOME=" + inst.Path("data")}, // kwok keeps a work folder in the home directory otherwise
		LogPath:      inst.Log("kwok"),
		StartTimeout: 30 * time.Second,
		StopGrace:    2 * time.Second,
	}, err
}
