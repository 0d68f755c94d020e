//! Compiles the messages of the key management service with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/kms.proto"], ["proto"])?;
    // Generates the client, and a server for tests.
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
