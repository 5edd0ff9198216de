// Package supervisor is the daemon behind a running instance: `up` starts it, the other verbs ask it over its socket.
package supervisor

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/process"
	"zerotrain.dev/devcluster/internal/simulated"
	"zerotrain.dev/devcluster/internal/unixsocket"
)

// Supervisor runs the components of one instance in the process that made it.
type Supervisor struct {
	plan     controlplane.Plan
	group    process.Group
	reporter *Reporter

	shutdown     chan struct{}
	shutdownOnce sync.Once
	ownerGone    atomic.Bool
	ready        atomic.Bool
}

// New makes a supervisor; program is the executable that components are started from.
func New(inst instance.Instance, settings instance.Settings, program string, reporter *Reporter) *Supervisor {
	return &Supervisor{
		plan:     controlplane.Plan{Instance: inst, Settings: settings, Program: program},
		reporter: reporter,
		shutdown: make(chan struct{}),
	}
}

func (s *Supervisor) requestShutdown() {
	s.shutdownOnce.Do(func() { close(s.shutdown) })
}

// Run brings the instance up, serves its socket until someone asks for the end, and takes everything down again. The error is that of
// the start; `up` has been told of it. mustCleanUp says that nobody is left who would remove the instance's folder.
func (s *Supervisor) Run() (mustCleanUp bool, err error) {
	err = s.run()
	return s.ownerGone.Load(), err
}

func (s *Supervisor) run() error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-stop:
			s.requestShutdown()
		case <-s.shutdown:
		}
		cancel() // a start that is under way gives up
	}()
	if err := s.followOwner(); err != nil {
		s.reporter.Failure(err)
		return err
	}
	listener, err := unixsocket.Listen(s.plan.Instance.ControlSocket())
	if err != nil {
		s.reporter.Failure(err)
		return err
	}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: 5 * time.Second}
	go server.Serve(listener) //nolint:errcheck // ends with Close below
	defer server.Close()
	defer s.group.KillAll()
	if err := s.start(ctx); err != nil {
		log.Printf("start failed: %v", err)
		s.group.KillAll()
		s.reporter.Failure(err)
		return err
	}
	s.ready.Store(true)
	s.reporter.Ready()
	<-s.shutdown
	log.Print("shutting down")
	return nil
}

// followOwner ends the instance with the process that it was started for.
func (s *Supervisor) followOwner() error {
	owner := s.plan.Settings.OwnerPID
	if owner == 0 || s.plan.Settings.Profile == instance.Node { // of a node, the process outside sees to it
		return nil
	}
	err := whenGone(owner, func() {
		s.ownerGone.Store(true)
		s.requestShutdown()
	})
	if err != nil {
		return fmt.Errorf("--owner-pid %d: %w", owner, err)
	}
	return nil
}

func (s *Supervisor) start(ctx context.Context) error {
	switch s.plan.Settings.Profile {
	case instance.Node:
		return s.startNode(ctx)
	case instance.Simulated:
		if err := s.startControlPlane(ctx); err != nil {
			return err
		}
		return s.startSimulated(ctx)
	default:
		return s.startControlPlane(ctx)
	}
}

func (s *Supervisor) startControlPlane(ctx context.Context) error {
	etcd, err := s.plan.Etcd()
	if err != nil {
		return err
	}
	server, err := s.plan.APIServer()
	if err != nil {
		return err
	}
	controllers, err := s.plan.Controllers()
	if err != nil {
		return err
	}
	for _, wave := range [][]process.Spec{{etcd}, {server}, controllers} {
		if err := s.group.StartWave(ctx, s.report, wave...); err != nil {
			return err
		}
	}
	return nil
}

func (s *Supervisor) startSimulated(ctx context.Context) error {
	spec, err := simulated.Spec(s.plan.Instance, s.plan.Settings)
	if err != nil {
		return err
	}
	client, err := s.plan.Client()
	if err != nil {
		return err
	}
	if err := s.group.StartWave(ctx, s.report, spec); err != nil {
		return err
	}
	started := time.Now()
	if err := simulated.CreateNodes(ctx, client, s.plan.Settings); err != nil {
		return err
	}
	s.report(fmt.Sprintf("%d simulated nodes", s.plan.Settings.NumNodes), time.Since(started))
	return nil
}

func (s *Supervisor) report(what string, took time.Duration) {
	s.reporter.Progress(fmt.Sprintf("%s ready (%.1f s)", what, took.Seconds()))
}
