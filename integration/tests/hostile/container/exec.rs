//! Exec enters the container with the node's privileges before it executes the command. It must not open files that
//! root in the container prepared, and the shim must trust only its own processes.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use coracle_integration::eventually;

use super::{Attacker, Pids, on_an_attacker};

const NULL: &str = "character special file 1:3";

/// Standard input of a command without input.
fn stdin_of_exec(attacker: &Attacker<'_>) -> String {
    attacker.sh("stat -L -c '%F %t:%T' /proc/self/fd/0")
}

/// Replaces /dev/null as root in the container.
fn replace_null(attacker: &Attacker<'_>, command: &str) {
    attacker.sh(&format!("rm -f /dev/null && {command}"));
}

/// A file that only the node's root can read, at a path without links.
fn secret(attacker: &Attacker<'_>) -> String {
    let path = attacker.machine.path("secret");
    fs::write(&path, "of the node").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::canonicalize(path).unwrap().to_str().unwrap().to_owned()
}

#[test]
fn dev_null_that_links_to_a_file_of_the_node_is_not_opened() {
    // In a shared pid namespace process 1 is the sandbox's, with hostPID the node's.
    for (pids, root) in [(Pids::Pod, "/proc/1/root/../../../../.."), (Pids::Node, "/proc/1/root")] {
        on_an_attacker(pids, move |attacker| {
            let secret = secret(attacker);
            replace_null(attacker, &format!("ln -s {root}{secret} /dev/null"));
            assert_eq!(stdin_of_exec(attacker), NULL);
            assert_eq!(attacker.sh("cat <&0; echo overwritten >&0"), "");
            assert_eq!(fs::read_to_string(secret).unwrap(), "of the node");
        });
    }
}

#[test]
fn dev_null_of_another_type_is_not_opened() {
    on_an_attacker(Pids::Container, |attacker| {
        let mut others = vec!["ln -s /proc/kmsg /dev/null", "mkfifo /dev/null", "mkdir /dev/null", "true"];
        let descriptors: Vec<String> =
            (0..12).map(|n| format!("ln -s /proc/self/fd/{n} /dev/null")).collect();
        others.extend(descriptors.iter().map(String::as_str));
        others.push("mknod /dev/null c 1 5");
        for other in others {
            attacker.sh("rmdir /dev/null 2>&1 || true");
            replace_null(attacker, other);
            assert_eq!(stdin_of_exec(attacker), NULL, "{other}");
        }
    });
}

/// Root in the container must not change the node's device through the descriptor that exec gives it.
#[test]
fn the_nodes_dev_null_keeps_its_mode() {
    on_an_attacker(Pids::Container, |attacker| {
        let before = fs::metadata("/dev/null").unwrap().permissions().mode();
        let output = attacker.try_sh("chmod 0 /proc/self/fd/0", "60");
        assert_eq!(fs::metadata("/dev/null").unwrap().permissions().mode(), before);
        assert!(!output.status.success());
    });
}

/// A command writes a report with the pid of a process of the node. The shim must not kill that process.
#[test]
fn a_forged_report_kills_no_process_of_the_node() {
    on_an_attacker(Pids::Container, |attacker| {
        let mut victim = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap();
        let root = attacker.pid(&attacker.id);
        let null = PathBuf::from(format!("/proc/{root}/root/dev/null"));
        let forge = format!(
            "test -p /proc/self/fd/0 || exit 3; printf 'P{}\n' >&0; exec 0<&-; exec sleep 100",
            victim.id()
        );
        for number in 3..48 {
            // Root in the container can do this without an exec.
            fs::remove_file(&null).unwrap();
            symlink(format!("/proc/self/fd/{number}"), &null).unwrap();
            let ended = attacker.try_sh(&forge, "1");
            assert!(!ended.status.success());
        }
        assert!(victim.try_wait().unwrap().is_none(), "the node's process was killed");
        victim.kill().unwrap();
        victim.wait().unwrap();
    });
}

/// The terminal comes from the container's devpts, independent of the target of /dev/ptmx.
#[test]
fn a_terminal_needs_no_path_of_the_container() {
    on_an_attacker(Pids::Container, |attacker| {
        for other in ["mkfifo /dev/ptmx", "ln -s /proc/1/root/dev/pts/ptmx /dev/ptmx", "true"] {
            attacker.sh(&format!("rm -f /dev/ptmx; {other}"));
            let crictl = format!("{:?} exec -i -t {} tty", attacker.cri.command(), attacker.id);
            let output = Command::new("script")
                .args(["-qec", &crictl.replace('"', ""), "/dev/null"])
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let screen = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(screen.contains("/dev/pts/"), "{other}: {screen}");
        }
    });
}

/// CVE-2024-21626: a working directory by a descriptor that the runtime left open.
#[test]
fn a_working_directory_by_a_descriptor_is_refused() {
    on_an_attacker(Pids::Container, |attacker| {
        for number in 3..32 {
            let mut config = super::container_config(Pids::Container);
            config["metadata"]["name"] = format!("cwd{number}").into();
            config["working_dir"] = format!("/proc/self/fd/{number}").into();
            let output = attacker.try_create(&config, Pids::Container);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && errors.contains("working directory"), "{number}: {errors}");
        }
    });
}

/// CVE-2024-21626: the descriptor was left open in the container's process and in execs.
#[test]
fn processes_of_a_container_have_no_descriptors_but_their_streams() {
    on_an_attacker(Pids::Container, |attacker| {
        let first = attacker.pid(&attacker.id);
        let of_first = fs::read_dir(format!("/proc/{first}/fd")).unwrap().flatten();
        let mut of_first: Vec<_> = of_first.map(|entry| entry.file_name().into_string().unwrap()).collect();
        of_first.sort_unstable();
        assert_eq!(of_first, ["0", "1", "2"]);
        // Descriptor 3 belongs to `ls`: it is the listed directory.
        assert_eq!(attacker.sh("ls /proc/self/fd"), "0\n1\n2\n3");
    });
}

/// A working directory that is replaced by a link to the node after the container's start.
#[test]
fn a_working_directory_that_becomes_a_link_to_the_node_is_refused() {
    for (pids, root) in [(Pids::Pod, "/proc/1/root/../../../../.."), (Pids::Node, "/proc/1/root")] {
        on_an_attacker(pids, move |attacker| {
            let mut config = super::container_config(pids);
            config["metadata"]["name"] = "cwd".into();
            config["working_dir"] = "/work".into();
            let id = attacker.create(&config, pids);
            attacker.cri.crictl(&["start", &id]);
            let run = |command: &str| attacker.cri.try_crictl(&["exec", "-s", &id, "sh", "-c", command]);
            let target = fs::canonicalize(attacker.machine.path("")).unwrap();
            let replaced = run(&format!("cd /; rmdir /work; ln -s {root}{} /work", target.display()));
            assert!(replaced.status.success());
            let output = run("ls -a");
            assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        });
    }
}

/// Root in the container may stop any process with its uid, including an exec before it executes the command.
#[test]
fn an_exec_that_the_container_stops_is_ended_in_time() {
    on_an_attacker(Pids::Container, |attacker| {
        let mut stopper = attacker.cri.command();
        let stop = "while :; do for p in /proc/[0-9]*; do p=${p#/proc/}; \
                    test $p -gt 1 -a $p != $$ && kill -STOP $p; done; done 2>/dev/null";
        stopper.args(["exec", &attacker.id, "sh", "-c", stop]);
        let mut stopper = stopper.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        for _ in 0..5 {
            let mut late = attacker.cri.command();
            late.args(["exec", "-s", "--timeout", "2", &attacker.id, "sh", "-c", "sleep 100"]);
            late.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut late = late.spawn().unwrap();
            // This is 60 s. crictl's own timeout is 120 s.
            let ended = eventually("the exec to end", 10, || late.try_wait().unwrap());
            assert!(!ended.success());
        }
        // The shim still responds.
        attacker.cri.crictl(&["stop", "-t", "1", &attacker.id]);
        stopper.kill().unwrap();
        stopper.wait().unwrap();
    });
}
