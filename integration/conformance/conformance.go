// Package conformance pins Kubernetes' own conformance suite, which scripts/conformance builds unmodified. The programs
// of the suite's images are tools of go.mod.
package conformance

import _ "k8s.io/kubernetes/test/e2e"
