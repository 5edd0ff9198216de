package instance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
)

// Below Linux's default ephemeral range (32768 up) and Kubernetes' NodePort range (30000 up), so that neither an outgoing connection
// nor a Service takes a port while its component is being restarted.
const firstPort, lastPort = 20000, 29999

// PickPorts chooses free loopback ports at random, so that instances started at the same moment rarely meet.
func PickPorts() (Ports, error) {
	var ports Ports
	taken := map[int]bool{}
	for _, port := range []*int{&ports.API, &ports.Etcd, &ports.EtcdPeer, &ports.ControllerManager, &ports.Scheduler} {
		free, err := pickPort(taken)
		if err != nil {
			return Ports{}, err
		}
		*port, taken[free] = free, true
	}
	ports.APIInside = ports.API
	return ports, nil
}

func pickPort(taken map[int]bool) (int, error) {
	const tries = 200
	for range tries {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if taken[port] {
			continue
		}
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		listener.Close()
		return port, nil
	}
	return 0, errors.New("no free TCP port on 127.0.0.1 between 20000 and 29999 in 200 tries; stop what holds them")
}
