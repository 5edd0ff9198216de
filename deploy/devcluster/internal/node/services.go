package node

import (
	"context"
	"fmt"
	"net"

	"zerotrain.dev/devcluster/internal/controlplane"
	"zerotrain.dev/devcluster/internal/relay"
)

// relayAPI serves the API where a listener is: the process outside comes in through one.
func (n Node) relayAPI(listener net.Listener) {
	relay.Serve(listener, func(ctx context.Context) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", n.Settings.Ports.APIInside))
	})
}

// ServeFixedAddresses makes the service addresses work that every pod uses: the DNS server's always, the API's only where no kube-proxy
// runs (with one, a packet to an address of this machine would never meet its rules).
func (n Node) ServeFixedAddresses() error {
	if err := addAddress("lo", controlplane.DNSIP+"/32"); err != nil {
		return err
	}
	if n.Settings.HasNft {
		return nil
	}
	if err := addAddress("lo", controlplane.ServiceIP+"/32"); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(controlplane.ServiceIP, "443"))
	if err != nil {
		return err
	}
	go n.relayAPI(listener)
	return nil
}
