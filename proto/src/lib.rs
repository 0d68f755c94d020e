//! Messages of CRI v1, NRI, ttrpc, the kubelet's plugin APIs, and Coracle's own protocols (shim and node). They are generated
//! from the .proto files. The only handwritten code prints bytes as text.
#![allow(missing_docs, unreachable_pub, reason = "generated; the .proto files carry the meaning")]
#![allow(clippy::all, clippy::struct_excessive_bools, clippy::too_many_lines, clippy::too_many_arguments)]

/// CRI v1 (`runtime.v1`): messages, servers and clients of RuntimeService and ImageService.
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// The shim's protocol, version 1.
pub mod shim {
    tonic::include_proto!("coracle.shim.v1");
}

/// The protocol between the binary's own subcommands and a running node.
pub mod node {
    tonic::include_proto!("coracle.node.v1");
}

/// Dynamic resource allocation: calls of the node to a driver.
pub mod dra {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// Dynamic resource allocation: the health of a driver's devices.
pub mod dra_health {
    tonic::include_proto!("v1alpha1");
}

/// Device plugins (`v1beta1`): their registration at the node, and the node's calls.
pub mod device_plugin {
    tonic::include_proto!("v1beta1");
}

/// The pod resources API of a node (`v1`).
pub mod pod_resources {
    tonic::include_proto!("v1");
}

/// Registration of plugins at the node.
pub mod plugin_registration {
    tonic::include_proto!("pluginregistration");
}

/// NRI (`nri.pkg.api.v1alpha1`): messages between the runtime and its plugins.
pub mod nri {
    tonic::include_proto!("nri.pkg.api.v1alpha1");
}

/// The messages of a ttrpc frame.
pub mod ttrpc {
    tonic::include_proto!("ttrpc");
}

/// Serializes bytes, which need not be UTF-8, as printable text.
fn as_text<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&String::from_utf8_lossy(bytes))
}
