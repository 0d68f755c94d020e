//! Images of a private registry: only pods with credentials use them, even after the node has them (KEP-2535).

use std::fs;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use coracle_integration::{Cluster, Machine, eventually, on_a_machine};
use serde_json::json;

const REGISTRY: &str = "127.0.0.1:5006";
/// The account `user` with the password `secret`, as in a file of htpasswd.
const ACCOUNT: &str = "user:$2b$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a\n";

/// A registry server with the images of the machine's registry. It requires the account, and ends when it is dropped.
struct PrivateRegistry(Child);

// === impl PrivateRegistry ===

impl PrivateRegistry {
    fn start(machine: &Machine) -> Self {
        let [accounts, config, data] = ["accounts", "private.yml", "registry"].map(|name| machine.path(name));
        fs::write(&accounts, ACCOUNT).unwrap();
        let text = format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '{REGISTRY}'}}\nauth: {{htpasswd: {{realm: test, path: {}}}}}\n",
            data.display(),
            accounts.display()
        );
        fs::write(&config, text).unwrap();
        let log = fs::File::create(machine.path("private.log")).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(config).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let server = Self(command.spawn().unwrap());
        eventually("the private registry", 10, || TcpStream::connect(REGISTRY).ok());
        server
    }
}

impl Drop for PrivateRegistry {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn create_secret(cluster: &Cluster, namespace: &str, name: &str, password: &str) {
    let server = format!("--docker-server={REGISTRY}");
    let password = format!("--docker-password={password}");
    let account = [server.as_str(), "--docker-username=user", &password];
    cluster
        .kubectl(&[&["-n", namespace, "create", "secret", "docker-registry", name][..], &account].concat());
}

/// Creates a pod with the private image.
fn create(cluster: &Cluster, name: &str, namespace: &str, secret: Option<&str>, pull_policy: &str) {
    let secrets: Vec<_> = secret.iter().map(|name| json!({"name": name})).collect();
    let container = json!({"name": "c", "image": format!("{REGISTRY}/library/busybox:latest"),
        "imagePullPolicy": pull_policy, "command": ["sleep", "100000"]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {"terminationGracePeriodSeconds": 0, "imagePullSecrets": secrets, "containers": [container]}});
    cluster.apply(&pod.to_string());
}

fn wait_running(cluster: &Cluster, name: &str, namespace: &str) {
    eventually(&format!("{name} to run"), 60, || {
        let pod = cluster.get(&["-n", namespace, "pod", name]);
        pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
    });
}

/// Waits until the container waits with one of the reasons. Returns the message.
fn wait_refused(cluster: &Cluster, name: &str, reasons: &[&str]) -> String {
    eventually(&format!("{name} to wait with one of {reasons:?}"), 60, || {
        let pod = cluster.get(&["pod", name]);
        let waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        let reason = waiting["reason"].as_str().unwrap_or_default();
        reasons.contains(&reason).then(|| waiting["message"].as_str().unwrap_or_default().to_owned())
    })
}

#[test]
fn pods_use_images_of_a_private_registry_only_with_credentials() {
    const NEVER: &[&str] = &["ErrImageNeverPull"];
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);
        let registry = PrivateRegistry::start(machine);
        cluster.kubectl(&["create", "namespace", "other"]);
        create_secret(&cluster, "default", "good", "secret");
        create_secret(&cluster, "default", "wrong", "guess");
        create_secret(&cluster, "other", "same", "secret");
        eventually("the service account", 10, || {
            cluster.try_kubectl(&["-n", "other", "get", "serviceaccount", "default"]).status.success()
        });

        let refused = &["ErrImagePull", "ImagePullBackOff"];
        create(&cluster, "early", "default", None, "IfNotPresent");
        wait_refused(&cluster, "early", refused);
        create(&cluster, "first", "default", Some("good"), "IfNotPresent");
        wait_running(&cluster, "first", "default");

        // The image is on the node now, and only pods with the credentials may use it. The registry verifies each
        // secret.
        create(&cluster, "without", "default", None, "IfNotPresent");
        create(&cluster, "wrong", "default", Some("wrong"), "IfNotPresent");
        create(&cluster, "never", "default", None, "Never");
        create(&cluster, "same", "other", Some("same"), "IfNotPresent");
        for name in ["without", "wrong"] {
            let message = wait_refused(&cluster, name, refused);
            assert!(!message.contains("guess"), "{message}");
        }
        wait_refused(&cluster, "never", NEVER);
        wait_running(&cluster, "same", "other");

        // The restarted node has the records of the pulls, and needs no registry for the verification.
        drop(registry);
        cluster.kill();
        cluster.start();
        create(&cluster, "later", "default", Some("good"), "IfNotPresent");
        create(&cluster, "again", "other", Some("same"), "Never");
        create(&cluster, "stranger", "default", None, "Never");
        create(&cluster, "guessing", "default", Some("wrong"), "Never");
        wait_running(&cluster, "later", "default");
        wait_running(&cluster, "again", "other");
        wait_refused(&cluster, "stranger", NEVER);
        wait_refused(&cluster, "guessing", NEVER);
    });
}
