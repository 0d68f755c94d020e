//! Access control: verbs, Pod Security levels, credentials, kubelet port.
