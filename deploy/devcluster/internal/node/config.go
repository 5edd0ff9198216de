package node

import (
	"bytes"
	"embed"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/instance"
)

//go:embed templates
var templates embed.FS

// Files written from templates, by their names in the instance's config folder.
var configFiles = map[string]string{
	"kubelet.yaml":           "kubelet.yaml.tmpl",
	"containerd.toml":        "containerd.toml.tmpl",
	"cni/10-bridge.conflist": "cni.json.tmpl",
	"Corefile":               "Corefile.tmpl",
}

// values is what the templates may use.
type values struct {
	Inside           string
	BinDir           string
	CgroupRoot       string
	ContainerdSocket string
	RuncPath         string
	DNSIP            string
	PodCIDR          string
	Snapshotter      string
	FeatureGates     map[string]bool
	UserMode         bool
	HasNft           bool
}

// writeConfig writes the node's configuration files. RuncShim says whether containers start through the shim.
func writeConfig(inst instance.Instance, settings instance.Settings, program string) error {
	runc, err := prepareRunc(inst, settings, program)
	if err != nil {
		return err
	}
	in := values{
		Inside:           Inside,
		BinDir:           settings.BinDir,
		CgroupRoot:       "/" + CgroupName(inst),
		ContainerdSocket: containerdSocket,
		RuncPath:         runc,
		DNSIP:            controlplane.DNSIP,
		PodCIDR:          podCIDR,
		Snapshotter:      snapshotter(),
		FeatureGates:     parseGates(settings.FeatureGates),
		UserMode:         settings.UserMode,
		HasNft:           settings.HasNft,
	}
	for name, source := range configFiles {
		if err := render(inst.Path("config", name), source, in); err != nil {
			return err
		}
	}
	return nil
}

func render(path, source string, in values) error {
	parsed, err := template.New(source).Option("missingkey=error").ParseFS(templates, "templates/"+source)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := parsed.Execute(&text, in); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, text.Bytes(), 0o600)
}

// snapshotter: overlay mounts where the kernel has them, else copies, which are slow but work anywhere.
func snapshotter() string {
	known, err := os.ReadFile("/proc/filesystems")
	if err == nil && strings.Contains(string(known), "\toverlay\n") {
		return "overlayfs"
	}
	return "native"
}

// parseGates reads A=true,B=false. The other components check the names.
func parseGates(text string) map[string]bool {
	gates := map[string]bool{}
	for _, pair := range strings.Split(text, ",") {
		if name, value, found := strings.Cut(strings.TrimSpace(pair), "="); found {
			gates[name] = value == "true"
		}
	}
	return gates
}

// prepareRunc returns the program that containerd calls to start containers: runc itself where it can do all that pods ask for, else the
// shim of this program, under a name by which main knows it.
func prepareRunc(inst instance.Instance, settings instance.Settings, program string) (string, error) {
	runc := filepath.Join(settings.BinDir, "runc")
	hasSeccomp := supportsSeccomp(runc)
	if hasSeccomp && !settings.UserMode {
		return runc, nil
	}
	text, err := json.Marshal(ShimSettings{Runc: runc, DropSeccomp: !hasSeccomp || settings.UserMode, UserMode: settings.UserMode})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(inst.Path("config", ShimName+".json"), text, 0o600); err != nil {
		return "", err
	}
	return inside("config", ShimName), os.Symlink(program, inst.Path("config", ShimName))
}

func supportsSeccomp(runc string) bool {
	output, err := exec.Command(runc, "--version").Output()
	return err == nil && strings.Contains(string(output), "libseccomp")
}
