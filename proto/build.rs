//! Compiles the .proto files with protox, so that no protoc has to be installed.

/// Messages in the configurations of pods and containers. They can be serialized to JSON, for verbose statuses.
const SHOWN: [&str; 31] = [
    "Capability",
    "CDIDevice",
    "ContainerConfig",
    "ContainerMetadata",
    "Device",
    "DNSConfig",
    "HugepageLimit",
    "IDMapping",
    "ImageSpec",
    "Int64Value",
    "KeyValue",
    "LinuxContainerConfig",
    "LinuxContainerResources",
    "LinuxContainerSecurityContext",
    "LinuxPodSandboxConfig",
    "LinuxSandboxSecurityContext",
    "Mount",
    "NamespaceOption",
    "PodSandboxConfig",
    "PodSandboxMetadata",
    "PortMapping",
    "SecurityProfile",
    "SELinuxOption",
    "UserNamespace",
    "WindowsContainerConfig",
    "WindowsContainerResources",
    "WindowsContainerSecurityContext",
    "WindowsCpuGroupAffinity",
    "WindowsNamespaceOption",
    "WindowsPodSandboxConfig",
    "WindowsSandboxSecurityContext",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let services =
        ["cri", "shim", "node", "dra", "drahealth", "pluginregistration", "deviceplugin", "podresources"]
            .map(|name| format!("proto/{name}.proto"));
    let files = protox::compile(services, ["proto"])?;
    let text = "#[serde(serialize_with = \"crate::as_text\")]";
    let cri = tonic_prost_build::configure().field_attribute(".runtime.v1.KeyValue.value", text);
    let shown = SHOWN.iter().fold(cri, |cri, message| {
        cri.type_attribute(format!(".runtime.v1.{message}"), "#[derive(serde::Serialize)]")
    });
    shown.compile_fds(files)?;
    // NRI uses ttrpc, so no gRPC clients and servers are generated. Maps are ordered, so that encoded messages can be
    // compared.
    let nri = protox::compile(["proto/nri.proto", "proto/ttrpc.proto"], ["proto"])?;
    let messages = tonic_prost_build::configure().build_client(false).build_server(false);
    messages.btree_map(".").compile_fds(nri)?;
    Ok(())
}
