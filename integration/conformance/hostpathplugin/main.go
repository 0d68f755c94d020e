// Command hostpathplugin is the proxy mode of the program of the same name of github.com/kubernetes-csi/csi-driver-host-path.
// The suite's drivers run in e2e.test: it dials -proxy-endpoint through a port forward, and gets the connections that the
// node's agent makes to -endpoint. The driver itself is not part of this program.
package main

import (
	"flag"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	endpoint := flag.String("endpoint", "", "the socket that the agent connects to: a path, or unix://PATH")
	proxy := flag.String("proxy-endpoint", "", "the address that the driver connects to: tcp://HOST:PORT")
	flag.String("v", "", "ignored")
	flag.String("nodeid", "", "ignored")
	flag.String("drivername", "", "ignored")
	flag.Parse()
	if *endpoint == "" || *proxy == "" {
		log.Fatal("only the proxy mode is here: set -endpoint and -proxy-endpoint")
	}
	agents, drivers := listen(*endpoint), listen(*proxy)
	go pair(agents, drivers)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT)
	<-stop
}

// listen opens the socket of an address with an optional scheme. A path replaces the socket of an earlier process.
func listen(address string) net.Listener {
	network, address := "unix", strings.TrimPrefix(address, "unix://")
	if rest, ok := strings.CutPrefix(address, "tcp://"); ok {
		network, address = "tcp", rest
	} else if err := os.Remove(address); err != nil && !os.IsNotExist(err) {
		log.Fatalf("cannot replace the socket: %v", err)
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		log.Fatal(err)
	}
	return listener
}

// pair joins each connection of the agent with the next connection of the driver, which waits in the listen queue.
func pair(agents, drivers net.Listener) {
	for {
		agent, err := agents.Accept()
		if err != nil {
			log.Fatal(err)
		}
		driver, err := drivers.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go move(agent, driver)
		go move(driver, agent)
	}
}

// move copies until the sender ends its side, then closes the receiver.
func move(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
}
