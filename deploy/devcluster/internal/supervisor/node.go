package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/node"
)

const (
	nodeReadyTimeout = 90 * time.Second
	largeImage       = 50 << 20 // takes long enough that one wonders
)

func (s *Supervisor) node() node.Node {
	return node.Node{Instance: s.plan.Instance, Settings: s.plan.Settings, Program: s.plan.Program}
}

// startNode brings the control plane and the node up. Images load while the control plane starts.
func (s *Supervisor) startNode(ctx context.Context) error {
	host := s.node()
	if err := host.Prepare(); err != nil {
		return err
	}
	if err := s.group.StartWave(ctx, s.report, host.Containerd()); err != nil {
		return err
	}
	images := make(chan error, 1)
	go func() { images <- s.loadImages() }()
	if err := s.startControlPlane(ctx); err != nil {
		return err
	}
	if err := s.startNodeComponents(ctx, host); err != nil {
		return err
	}
	return <-images
}

func (s *Supervisor) startNodeComponents(ctx context.Context, host node.Node) error {
	client, err := s.plan.Client()
	if err != nil {
		return err
	}
	if err := host.ServeFixedAddresses(); err != nil {
		return err
	}
	if err := errors.Join(node.CreateRoles(ctx, client), host.CreateStorage(ctx, client)); err != nil {
		return err
	}
	started := time.Now()
	if err := s.group.StartWave(ctx, s.report, host.Components()...); err != nil {
		return err
	}
	if err := client.AwaitNode(ctx, controlplane.NodeName, nodeReadyTimeout); err != nil {
		return err
	}
	s.report("node", time.Since(started))
	go host.RecycleVolumes(ctx, client)
	return nil
}

func (s *Supervisor) loadImages() error {
	for _, archive := range append([]string{node.PauseArchive(s.plan.Settings)}, s.plan.Settings.Images...) {
		started := time.Now()
		if info, err := os.Stat(archive); err == nil && info.Size() > largeImage {
			s.reporter.Progress(fmt.Sprintf("loading image %s (%d MB) ...", filepath.Base(archive), info.Size()>>20))
		}
		if err := node.LoadImage(s.plan.Settings, archive); err != nil {
			return fmt.Errorf("loading the image %s: %w", archive, err)
		}
		s.report("image "+filepath.Base(archive), time.Since(started))
	}
	return nil
}

func (s *Supervisor) loadImage(path string) error {
	if s.plan.Settings.Profile != instance.Node {
		return fmt.Errorf("load-image needs --profile node: this instance has --profile %s and runs no containers", s.plan.Settings.Profile)
	}
	return node.LoadImage(s.plan.Settings, path)
}

// RunOutside is the daemon of a node: it stays outside the node's namespaces. report and lock are handed on to the supervisor inside.
func RunOutside(inst instance.Instance, program string, report, lock *os.File) (mustCleanUp bool, err error) {
	settings, err := inst.ReadSettings()
	if err != nil {
		return false, err
	}
	ended := make(chan struct{})
	if settings.OwnerPID != 0 {
		err := whenGone(settings.OwnerPID, func() { close(ended) })
		if err != nil {
			return false, fmt.Errorf("--owner-pid %d: %w", settings.OwnerPID, err)
		}
	}
	err = node.Outside(inst, settings, program, ended, report, lock)
	select {
	case <-ended:
		return true, err
	default:
		return false, err
	}
}
