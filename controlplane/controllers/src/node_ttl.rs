//! Sets an annotation of nodes: the time in which a kubelet may cache secrets and config maps. The time grows with the
//! number of nodes. Source: `pkg/controller/ttl` of Kubernetes. The nodes of this project do not read the annotation,
//! because they watch these objects.

pub(crate) mod plan;
pub(crate) mod run;
