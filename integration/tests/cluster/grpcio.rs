//! A gRPC client with the C core (Python, C++, Ruby): it sends the percent-encoded path of the socket as `:authority`.

use std::process::Command;

use coracle_integration::{Cri, Machine, on_a_machine};

/// Makes two calls with empty messages on one connection and prints status and length of each response. The second call
/// refers to the authority by its index in the HPACK table.
const CLIENT: &str = r#"
import sys, grpc
with grpc.insecure_channel("unix://" + sys.argv[1]) as channel:
    for service, call in [("Runtime", "Version"), ("Runtime", "Status"), ("Image", "ListImages"), ("Runtime", "Version")]:
        method = channel.unary_unary(f"/runtime.v1.{service}Service/{call}", lambda message: message, lambda message: message)
        try:
            print(call, "OK", len(method(b"", timeout=60)) > 0)
        except grpc.RpcError as error:
            print(call, error.code().name, error.details())
"#;

#[test]
fn a_client_with_the_c_core_is_served() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cri = Cri::runtime(machine, &mirrors);
        let output = Command::new("python3")
            .args(["-c", CLIENT])
            .arg(machine.path("run/cri.sock"))
            .env("PYTHONPATH", Machine::tool("grpcio", "scripts/grpcio"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            ["Version OK True", "Status OK True", "ListImages OK False", "Version OK True"],
            "{errors}"
        );
        cri.down();
    });
}
