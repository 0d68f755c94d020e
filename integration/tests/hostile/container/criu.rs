//! Programs with the command line of CRIU. After a crash during a checkpoint, the runtime waits until its CRIU has ended.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use coracle_integration::{Cri, eventually, on_a_machine};
use serde_json::json;

use super::cgroups::{directory, freezer};
use super::one_call::{Call, Entry};
use super::{Attacker, BUSYBOX, Pids};

/// The call `pause`: the program runs until a signal ends it.
const PAUSE: Call = Call { entry: Entry::Syscall, number: 34, arguments: [0, 0] };
/// User id of a local user without rights.
const NOBODY: u32 = 65534;

/// The container stayed frozen until the program ended, and could not be removed. A container can read the path of its
/// layer in its table of mounts.
#[test]
fn a_program_with_the_command_line_of_criu_keeps_no_container_frozen() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cri = Cri::runtime(machine, &mirrors);
        cri.crictl(&["pull", BUSYBOX]);
        let programs = machine.path("programs");
        fs::create_dir(&programs).unwrap();
        PAUSE.write(&programs.join("criu"));
        let attacker = Attacker::new(machine, &cri, Pids::Container, |config| {
            config["mounts"] = json!([{ "container_path": "/programs", "host_path": programs }]);
        });
        let pid = attacker.pid(&attacker.id);
        let layer = machine.path("state/containers").join(&attacker.id);
        assert!(layer.is_dir());
        let build = layer.join("checkpoint");
        let dump = format!("dump --images-dir {0}/checkpoint --work-dir {0}", build.display());

        attacker.sh(&format!("/programs/criu {dump} </dev/null >/dev/null 2>&1 &"));
        let mut of_user = Command::new("bash");
        of_user.arg0("/sbin/criu").args(["-c", "read x", "bash"]).args(dump.split(' ')).uid(NOBODY);
        let mut of_user = of_user.stdin(Stdio::piped()).spawn().unwrap();
        let group = directory(pid, "freezer");
        eventually("the program in the container", 20, || {
            let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap();
            pids.lines().any(|pid| {
                fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| line.starts_with(b"/programs/criu\0"))
            })
        });
        // The state that a crash during a checkpoint leaves: incomplete files, and a frozen container.
        fs::create_dir(&build).unwrap();
        let (file, frozen, thawed) = freezer(&group);
        let is = |state: &str| fs::read_to_string(&file).unwrap().trim() == state;
        fs::write(&file, frozen).unwrap();
        eventually("the container to be frozen", 20, || is(frozen));
        let pod = attacker.pod.clone();
        cri.restart();
        eventually("the container to be thawed", 30, || is(thawed));
        cri.crictl(&["rmp", "-f", &pod]);
        eventually("the layer to be removed", 20, || !layer.exists());
        assert!(of_user.try_wait().unwrap().is_none(), "the program of the local user was ended");
        drop(of_user.stdin.take());
        of_user.wait().unwrap();
        cri.down();
    });
}
