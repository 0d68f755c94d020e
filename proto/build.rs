//! Compiles the .proto files with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/cri.proto", "proto/shim.proto", "proto/node.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    // NRI goes over ttrpc: messages alone. Maps are in order, so that what is sent can be compared.
    let nri = protox::compile(["proto/nri.proto", "proto/ttrpc.proto"], ["proto"])?;
    let messages = tonic_prost_build::configure().build_client(false).build_server(false);
    messages.btree_map(".").compile_fds(nri)?;
    Ok(())
}
