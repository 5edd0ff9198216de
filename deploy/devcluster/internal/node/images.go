package node

import (
	"path/filepath"

	"zerotrain.dev/devcluster/internal/instance"
)

// Tools are the programs that a node needs beside this one.
var Tools = []string{
	"containerd", "containerd-shim-runc-v2", "ctr", "runc", "bridge", "loopback", "host-local", "portmap", "coredns",
}

// ImagesDir is where the tools' builder puts images: beside the folder of the tools.
func ImagesDir(settings instance.Settings) string {
	return filepath.Join(filepath.Dir(settings.BinDir), "images")
}

// PauseArchive is the image of every pod's sandbox.
func PauseArchive(settings instance.Settings) string {
	return filepath.Join(ImagesDir(settings), "pause.tar")
}

// LoadImage imports a docker-archive into the containerd of this node. --local: the other way streams every byte through the daemon, twice as slow.
func LoadImage(settings instance.Settings, archive string) error {
	target, err := filepath.EvalSymlinks(archive)
	if err != nil {
		return err
	}
	return run(filepath.Join(settings.BinDir, "ctr"), "--address", containerdSocket, "--namespace", "k8s.io",
		"images", "import", "--local", "--snapshotter", snapshotter(), target)
}
