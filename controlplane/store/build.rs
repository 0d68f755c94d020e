//! Compiles the messages of etcd with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/etcd.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}
