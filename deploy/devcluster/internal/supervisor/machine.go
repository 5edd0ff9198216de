package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"zerotrain.dev/devcluster/internal/instance"
)

// What each profile needs beside this program.
var tools = map[instance.Profile][]string{
	instance.Simulated: {"kwok"},
	instance.Node: {
		"containerd", "containerd-shim-runc-v2", "ctr", "runc", "bridge", "loopback", "host-local", "portmap", "coredns",
	},
}

// CheckTools says which tools of the profile are not in the folder.
func CheckTools(settings instance.Settings) error {
	var missing []string
	for _, tool := range tools[settings.Profile] {
		if _, err := os.Stat(filepath.Join(settings.BinDir, tool)); err != nil {
			missing = append(missing, tool)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("--bin-dir %s lacks %s, which --profile %s needs; build them: python deploy/devcluster/build.py tools --profile %s",
			settings.BinDir, strings.Join(missing, ", "), settings.Profile, settings.Profile)
	}
	return nil
}

// Adapt settles what depends on the machine. tell is called with what a person should know about it.
func Adapt(_ *instance.Settings, _ func(string)) error {
	return nil
}

// CleanUp removes what an instance has left outside its processes: its folder. The caller holds the lock, so no supervisor runs.
func CleanUp(inst instance.Instance) error {
	return inst.Remove()
}
