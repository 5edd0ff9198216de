package process

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"
	"strings"
	"sync"
	"time"
)

// Group is the components of one cluster in waves: a wave starts when the one before is ready. All are killed at once.
type Group struct {
	mu    sync.Mutex
	waves [][]*Component
}

// StartWave starts components side by side, adds them to the group and waits for all. report is called as each becomes ready.
func (g *Group) StartWave(ctx context.Context, report func(name string, took time.Duration), specs ...Spec) error {
	wave := make([]*Component, len(specs))
	for i, spec := range specs {
		wave[i] = New(spec)
	}
	g.mu.Lock()
	g.waves = append(g.waves, wave)
	g.mu.Unlock()
	return g.each(wave, func(component *Component) error {
		started := time.Now()
		err := component.Start(ctx)
		if err == nil {
			report(component.spec.Name, time.Since(started))
		}
		return err
	})
}

func (g *Group) each(wave []*Component, do func(*Component) error) error {
	errs := make([]error, len(wave))
	var done sync.WaitGroup
	for i, component := range wave {
		done.Add(1)
		go func() {
			defer done.Done()
			errs[i] = do(component)
		}()
	}
	done.Wait()
	return errors.Join(errs...)
}

// KillAll ends every component at once and without grace: nothing of an instance outlives it, so there is nothing to save, and an API
// server that is asked to end waits for the watches of its clients.
func (g *Group) KillAll() {
	g.mu.Lock()
	all := slices.Concat(g.waves...)
	g.mu.Unlock()
	started := time.Now()
	g.each(all, func(component *Component) error { //nolint:errcheck // Stop cannot fail
		component.Stop(true)
		return nil
	})
	log.Printf("%d components killed after %.1f s", len(all), time.Since(started).Seconds())
}

// Find returns the component of that name; the error lists those there are.
func (g *Group) Find(name string) (*Component, error) {
	var names []string
	for _, status := range g.Status() {
		names = append(names, status.Name)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, wave := range g.waves {
		for _, component := range wave {
			if component.spec.Name == name {
				return component, nil
			}
		}
	}
	return nil, fmt.Errorf("--component %q: this instance runs %s", name, strings.Join(names, ", "))
}

// Status of all components in starting order.
func (g *Group) Status() []Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []Status
	for _, wave := range g.waves {
		for _, component := range wave {
			all = append(all, component.Status())
		}
	}
	return all
}
