//! What is wanted on this node: the API server's pods with `spec.nodeName` of this node, or, while there is
//! no API server, the remembered ones. Merged into one closed [`PodChange`].

pub(crate) mod record;
pub mod values;
