//! Published vulnerabilities of runc, containerd, CRI-O, the kubelet and kube-apiserver, tried on this node.
