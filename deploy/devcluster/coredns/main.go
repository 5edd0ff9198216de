// The cluster's DNS server: CoreDNS with the few plugins that the development cluster's Corefile names.
// The stock program links some sixty plugins and their clouds' clients; linking six keeps the build short.
package main

import (
	"slices"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

// The order of dnsserver.Directives is the order in which a query passes the plugins, whatever the Corefile says.
func main() {
	linked := []string{"bind", "health", "ready", "errors", "cache", "kubernetes"}
	dnsserver.Directives = slices.Clone(linked)
	coremain.Run()
}
