//! `coracle backup` of a running and of a stopped control plane, and `coracle restore`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use coracle_integration::{Machine, checked_stdout, on_a_machine};
use nix::sys::signal::Signal;

use crate::high_availability::Plane;

fn coracle(command: &str, plane: &Plane, file: &Path) -> Output {
    let mut coracle = Command::new(Machine::coracle());
    coracle.arg(command).arg("--state-dir").arg(&plane.state).arg(file).output().unwrap()
}

#[test]
fn deleted_objects_are_restored_from_a_backup() {
    on_a_machine(|machine| {
        let mut plane = Plane::new(machine, "plane", "127.0.0.1:6443", &[]);
        plane.start();
        let kubectl = |plane: &Plane, line: &str| plane.kubectl.kubectl(&line.split(' ').collect::<Vec<_>>());
        kubectl(&plane, "create configmap kept --from-literal=a=b");
        kubectl(&plane, "create secret generic word --from-literal=word=hush");
        let (running, stopped) = (machine.path("running.backup"), machine.path("stopped.backup"));
        std::thread::scope(|scope| {
            let writes = scope.spawn(|| {
                (0..5).for_each(|n| {
                    drop(kubectl(&plane, &format!("create configmap during{n} --from-literal=a=b")))
                });
            });
            assert!(checked_stdout(&coracle("backup", &plane, &running)).contains("objects up to revision"));
            writes.join().unwrap();
        });
        assert_eq!(fs::metadata(&running).unwrap().permissions().mode() & 0o777, 0o600);
        let bytes = fs::read(&running).unwrap();
        assert!(!bytes.windows(8).any(|part| part == b"aHVzaA=="), "the backup has a secret in plain text");
        kubectl(&plane, "delete configmap kept");
        let refused = coracle("restore", &plane, &running);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("in use"), "{refused:?}");
        plane.end(Signal::SIGTERM);
        checked_stdout(&coracle("backup", &plane, &stopped));
        checked_stdout(&coracle("restore", &plane, &running));
        plane.start();
        assert_eq!(kubectl(&plane, "get configmap kept -o jsonpath={.data.a}"), "b");
        assert_eq!(kubectl(&plane, "get secret word -o jsonpath={.data.word}"), "aHVzaA==");
        plane.end(Signal::SIGKILL);
        checked_stdout(&coracle("restore", &plane, &stopped));
        plane.start();
        let names = kubectl(&plane, "get configmaps -o name");
        assert!(names.contains("during4") && !names.contains("kept"), "{names}");
    });
}
