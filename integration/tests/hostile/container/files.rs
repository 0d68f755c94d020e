//! Files in a container that the node reads. They must neither block the node nor lead to other files.

use std::fs;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::{Attacker, EXEC_TIMEOUT, Pids, container_config, on_a_runtime, on_an_attacker};

/// An exec reads HOME from /etc/passwd.
#[test]
fn a_passwd_that_is_not_a_regular_file_does_not_block_exec() {
    on_an_attacker(Pids::Container, |attacker| {
        let mut others: Vec<String> = ["mkfifo -m 666", "ln -s /dev/zero", "mkdir", "truncate -s 4G"]
            .iter()
            .map(|other| format!("{other} /etc/passwd"))
            .collect();
        others.extend((0..10).map(|number| format!("ln -s /proc/self/fd/{number} /etc/passwd")));
        for other in others {
            attacker.sh(&format!("rm -rf /etc/passwd; {other}"));
            // An exec that opens a FIFO without a writer never ends.
            let output = attacker.try_sh("echo $HOME", EXEC_TIMEOUT);
            assert!(output.status.success(), "{other}: {}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "/", "{other}");
        }
    });
}

/// Container creation, with a volume at /etc or /dev.
#[test]
fn a_volume_with_special_files_does_not_block_a_start() {
    on_a_runtime(|machine, cri| {
        let attacker = Attacker::new(machine, cri, Pids::Container, |_| {});
        let dir = machine.path("volume");
        fs::create_dir(&dir).unwrap();
        mkfifo(&dir.join("passwd"), Mode::from_bits_truncate(0o666)).unwrap();
        mkfifo(&dir.join("group"), Mode::from_bits_truncate(0o666)).unwrap();
        mkfifo(&dir.join("null"), Mode::from_bits_truncate(0o666)).unwrap();
        let mut config = container_config(Pids::Container);
        config["metadata"]["name"] = "etc".into();
        config["mounts"] = serde_json::json!([{ "container_path": "/etc", "host_path": dir }]);
        let id = attacker.create(&config, Pids::Container);
        cri.crictl(&["start", &id]);
        assert_eq!(cri.crictl(&["exec", "-s", "--timeout", "60", &id, "echo", "here"]), "here");
        // The attacker's /dev/null is not a device: the container is refused without delay.
        config["metadata"]["name"] = "dev".into();
        config["mounts"][0]["container_path"] = "/dev".into();
        let refused = attacker.try_create(&config, Pids::Container);
        assert!(!refused.status.success());
        let errors = String::from_utf8_lossy(&refused.stderr);
        assert!(errors.contains("/dev/null"), "{errors}");
    });
}
