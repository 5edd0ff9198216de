package node

import (
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"

	"zerotrain.dev/devcluster/internal/controlplane"
)

// buildNetwork prepares the network namespace: loopback, and a pair of virtual links that gives the node an address and a default route.
// Both ends are inside: nothing leaves this network. (A dummy link would do; not every kernel has them.)
func buildNetwork() error {
	if err := addAddress("lo"); err != nil {
		return err
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "gateway0"}, PeerName: "node0"}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("making a pair of virtual links (kernel module veth): %w", err)
	}
	if err := addAddress("gateway0", gatewayIP+"/24"); err != nil {
		return err
	}
	if err := addAddress("node0", controlplane.NodeIP+"/24"); err != nil {
		return err
	}
	// Programs look an address up before a Service rule rewrites it: without a default route they would not even try.
	node, err := netlink.LinkByName("node0")
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: node.Attrs().Index, Gw: net.ParseIP(gatewayIP), Src: net.ParseIP(controlplane.NodeIP)}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

// addAddress brings a link up and gives it addresses.
func addAddress(name string, addresses ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	for _, text := range addresses {
		address, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, address); err != nil {
			return fmt.Errorf("address %s on %s: %w", text, name, err)
		}
	}
	return netlink.LinkSetUp(link)
}
