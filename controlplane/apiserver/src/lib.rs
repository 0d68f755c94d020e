//! The Kubernetes API over HTTP: authentication, authorization, admission, storage, watch, discovery.
