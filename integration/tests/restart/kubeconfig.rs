//! An agent that has only a kubeconfig gets a serving certificate, as a kubelet does.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use coracle_integration::{Machine, Nodes, eventually, on_a_machine};
use nix::sys::signal::Signal;

/// A control plane, and the path of a kubeconfig for `node-1`.
fn plane(machine: &mut Machine) -> (Nodes, PathBuf) {
    let nodes = Nodes::control_plane_only(machine, "10.42.0.0/16", &["--issue-node", "node-1"]);
    let log = machine.path("nodes/plane.log");
    let command = eventually("the command", 10, || {
        let text = fs::read_to_string(&log).ok()?;
        text.lines().find(|line| line.starts_with("coracle agent")).map(str::to_owned)
    });
    let mut words = command.split_whitespace().skip_while(|word| *word != "--kubeconfig");
    let path = PathBuf::from(words.nth(1).unwrap());
    let text = fs::read_to_string(&path).unwrap();
    let server = text.lines().find_map(|line| line.split("https://").nth(1)).unwrap();
    let server = server.split(['"', '\'', '/', ' ', '}', ',']).next().unwrap().to_owned();
    let own = machine.path("kubeconfig");
    fs::write(&own, text.replace(&server, "192.0.2.2:6443")).unwrap();
    (nodes, own)
}

/// The certificate of the kubelet API, as openssl prints it.
fn shown(nodes: &mut Nodes) -> Option<String> {
    let script = "openssl s_client -connect 127.0.0.1:10250 </dev/null 2>/dev/null | \
                  openssl x509 -noout -subject -issuer -ext subjectAltName";
    let output = nodes.agent("node-1").host().command("sh").args(["-c", script]).output().unwrap();
    Some(String::from_utf8(output.stdout).unwrap()).filter(|text| !text.is_empty())
}

#[test]
fn an_agent_with_only_a_kubeconfig_creates_and_keeps_its_serving_certificate() {
    on_a_machine(|machine| {
        let (mut nodes, kubeconfig) = plane(machine);
        nodes.join(1, &format!("coracle agent --kubeconfig {}", kubeconfig.display()), &[]);
        nodes.wait_ready();
        let first = eventually("the kubelet API", 10, || shown(&mut nodes));
        assert!(first.contains("subject=CN = node-1") && first.contains("issuer=CN = node-1"), "{first}");
        assert!(first.contains("DNS:node-1") && first.contains("IP Address:192.0.2.11"), "{first}");
        let pki = nodes.agent("node-1").path("state/agent/pki");
        let certificate = fs::read(pki.join("kubelet.crt")).unwrap();
        assert_eq!(fs::metadata(pki.join("kubelet.key")).unwrap().permissions().mode() & 0o777, 0o600);
        // Without a client CA, the kubelet API accepts no certificate, not even the administrator's.
        let script = "curl -sk -o /dev/null -w '%{http_code}' https://127.0.0.1:10250/pods";
        assert_eq!(nodes.agent("node-1").host().run("sh", &["-c", script]), "401");
        nodes.agent("node-1").end(Signal::SIGKILL);
        nodes.agent("node-1").join(&format!("coracle agent --kubeconfig {}", kubeconfig.display()));
        eventually("the kubelet API", 10, || shown(&mut nodes));
        assert_eq!(
            fs::read(pki.join("kubelet.crt")).unwrap(),
            certificate,
            "the agent has another certificate after a restart"
        );
    });
}

#[test]
fn an_agent_with_a_kubeconfig_requests_its_serving_certificate_from_the_cluster() {
    on_a_machine(|machine| {
        let (mut nodes, kubeconfig) = plane(machine);
        let command = format!("coracle agent --kubeconfig {} --server-tls-bootstrap", kubeconfig.display());
        nodes.join(1, &command, &[]);
        nodes.wait_ready();
        let text = eventually("the certificate", 30, || shown(&mut nodes));
        assert!(
            text.contains("CN = system:node:node-1") && !text.contains("issuer=O = system:nodes"),
            "{text}"
        );
        let path = nodes.agent("node-1").path("state/agent/pki/kubelet-server-current.pem");
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    });
}
