//! Tells kubelets by an annotation of their nodes how long they may cache secrets and config maps: the larger the cluster,
//! the longer. Source: `pkg/controller/ttl` of Kubernetes. The nodes of this project do not need it, because they watch
//! these objects.

pub(crate) mod plan;
pub(crate) mod run;
