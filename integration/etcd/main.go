// The etcd server as published, without changes: its module has replace directives, so `go install` refuses it.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
