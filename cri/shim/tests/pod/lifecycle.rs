//! Create, start, exit, delete.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{Pod, cgroup_mounts, until};
use crate::shim_client::ErrorKind;

pub(crate) async fn a_container_runs_and_its_output_and_code_are_kept(mut pod: Pod) {
    pod.run(
        "c",
        "echo out; echo err >&2; hostname; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; exit 17",
    )
    .await;
    let exit = pod.exit("c", "").await;
    assert_eq!((exit.code, exit.signal, exit.oom_killed), (17, 0, false));
    assert_eq!(pod.output("c", "stdout"), ["out", "the-pod", "0"]);
    assert_eq!(pod.output("c", "stderr"), ["err"]);
    let state = pod.shim.hello().await.unwrap();
    assert_eq!(state.containers[0].exit.unwrap().code, 17);
    let began = Instant::now();
    pod.shim.delete("c").await.unwrap();
    println!("  deleted {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
    pod.shim.delete("c").await.unwrap();
    assert!(pod.shim.hello().await.unwrap().containers.is_empty());
    pod.end().await;
}

pub(crate) async fn a_missing_command_fails_at_start_by_name(mut pod: Pod) {
    let mut spec = pod.spec("c", "");
    spec["process"]["args"] = json!(["no-such-command"]);
    pod.shim.create(pod.create_request("c", &spec)).await.unwrap();
    let error = pod.shim.start("c").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::CommandNotFound, "{error}");
    assert!(error.message.contains("no-such-command"), "{error}");
    assert_eq!(pod.exit("c", "").await.code, 127);
    pod.end().await;
}

pub(crate) async fn a_missing_working_directory_is_made(mut pod: Pod) {
    let mut spec = pod.spec("c", "echo $PWD");
    spec["process"]["cwd"] = json!("/a/b/c");
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["/a/b/c"]);
    pod.end().await;
}

pub(crate) async fn a_signal_ends_a_container_and_is_reported(mut pod: Pod) {
    pod.run("c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done").await;
    pod.until_logged("c", "ready").await;
    pod.shim.kill("c", libc::SIGTERM).await.unwrap();
    assert_eq!(pod.exit("c", "").await.code, 3);
    pod.run("d", "sleep 1000").await;
    pod.shim.kill("d", libc::SIGKILL).await.unwrap();
    let exit = pod.exit("d", "").await;
    assert_eq!((exit.code, exit.signal, exit.oom_killed), (137, 9, false));
    pod.end().await;
}

pub(crate) async fn a_container_over_its_memory_limit_is_reported_as_oom_killed(mut pod: Pod) {
    let mut spec = pod.spec("c", "exec dd if=/dev/zero of=/dev/null bs=200M count=1");
    spec["linux"]["resources"] = json!({ "memory": { "limit": 16 << 20 } });
    pod.run_request(pod.create_request("c", &spec)).await;
    let exit = pod.exit("c", "").await;
    assert_eq!((exit.code, exit.oom_killed), (137, true));
    pod.end().await;
}

pub(crate) async fn a_grandchild_that_holds_the_output_delays_the_exit_briefly(pod: Pod) {
    pod.end().await;
    // Only in a shared pid namespace can a process outlive the container's first process.
    let mut pod = Pod::start_with(|config| config.share_pid = true).await;
    let init = pod.shim.hello().await.unwrap().init_pid;
    let mut spec = pod.spec("c", "sleep 1000 & exit 5");
    spec["linux"]["namespaces"][1] = json!({ "type": "pid", "path": format!("/proc/{init}/ns/pid") });
    pod.run_request(pod.create_request("c", &spec)).await;
    // The grandchild holds the output for 1,000 s. The delay is a fraction of a second.
    let exit = tokio::time::timeout(Duration::from_secs(60), pod.exit("c", "")).await;
    assert_eq!(exit.expect("the exit does not wait for the grandchild").code, 5);
    pod.shim.delete("c").await.unwrap();
    pod.end().await;
}

pub(crate) async fn a_program_starts_with_default_signals(mut pod: Pod) {
    pod.run("c", "grep Sig /proc/self/status; ls /proc/self/fd | wc -l; cat /proc/self/oom_score_adj").await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    let output = pod.output("c", "stdout");
    for name in ["SigBlk", "SigIgn"] {
        let line = output.iter().find(|line| line.starts_with(name)).unwrap();
        assert!(line.ends_with("\t0000000000000000"), "{line}");
    }
    // The four descriptors are 0, 1, 2 and the directory that ls reads.
    assert_eq!(output[output.len() - 2..], ["4", "100"]);
    pod.end().await;
}

pub(crate) async fn nested_cgroups_are_removed(pod: Pod) {
    pod.run("c", "sleep 1000").await;
    let mut made = 0;
    for mount in cgroup_mounts() {
        let own = mount.join(pod.cgroup.trim_start_matches('/')).join("c");
        if own.is_dir() {
            fs::create_dir_all(own.join("a/b")).unwrap();
            made += 1;
        }
    }
    assert!(made > 0);
    pod.shim.delete("c").await.unwrap();
    pod.end().await;
}

pub(crate) async fn a_broken_spec_leaves_nothing_and_names_the_cause(pod: Pod) {
    let mut spec = pod.spec("c", "true");
    spec["mounts"][0] = json!({
        "destination": "/x", "type": "bind", "source": "/no/such/volume", "options": ["rbind"],
    });
    let error = pod.shim.create(pod.create_request("c", &spec)).await.unwrap_err();
    println!("  {error}");
    assert!(error.message.contains("/no/such/volume") || error.message.contains("ENOENT"), "{error}");
    let error = pod.shim.start("c").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound, "{error}");
    pod.end().await;
}

pub(crate) async fn a_shared_pid_namespace_has_an_init_that_reaps(pod: Pod) {
    pod.end().await;
    let mut pod = Pod::start_with(|config| config.share_pid = true).await;
    let init = pod.shim.hello().await.unwrap().init_pid;
    let script = "cat /proc/1/comm; orphan=$(sleep 0.1 >/dev/null & echo $!); i=0; \
        while [ -e /proc/$orphan ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done; grep -l Z /proc/*/stat | wc -l";
    let mut spec = pod.spec("c", script);
    spec["linux"]["namespaces"][1] = json!({ "type": "pid", "path": format!("/proc/{init}/ns/pid") });
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["coracle-init", "0"]);
    pod.end().await;
}

/// A container gains no rights through process 1, even if it is permitted to trace process 1.
pub(crate) async fn process_1_gives_no_access_to_the_node(pod: Pod) {
    pod.end().await;
    for may_trace in [false, true] {
        let mut pod = Pod::start_with(|config| config.share_pid = true).await;
        let init = pod.shim.hello().await.unwrap().init_pid;
        let script = "grep -E 'CapPrm|CapEff|NoNewPrivs' /proc/1/status; ls /proc/1/root/; ls /proc/1/root/../etc; exit 3";
        let mut spec = pod.spec("c", script);
        spec["linux"]["namespaces"][1] = json!({ "type": "pid", "path": format!("/proc/{init}/ns/pid") });
        for set in ["bounding", "effective", "permitted"] {
            let list = spec["process"]["capabilities"][set].as_array_mut().unwrap();
            list.extend(may_trace.then(|| json!("CAP_SYS_PTRACE")));
        }
        pod.run_request(pod.create_request("c", &spec)).await;
        assert_eq!(pod.exit("c", "").await.code, 3);
        let shown = pod.output("c", "stdout");
        let only_tracing = ["CapPrm:\t0000000000080000", "CapEff:\t0000000000080000", "NoNewPrivs:\t1"];
        assert_eq!(shown[..3], only_tracing);
        // The last line names the executable of process 1, if the container is permitted to trace it.
        assert_eq!(shown[3..], if may_trace { vec!["coracle-init"] } else { vec![] });
        let refused = pod.output("c", "stderr").join(" ");
        let why = if may_trace { "No such file" } else { "Permission denied" };
        assert!(refused.contains(why), "{refused}");
        pod.end().await;
    }
}

pub(crate) async fn process_1_starts_without_a_label_that_is_unknown(pod: Pod) {
    pod.end().await;
    let mut pod = Pod::start_with(|config| {
        config.share_pid = true;
        config.process_label = "no:such:label".to_owned();
    })
    .await;
    let init = pod.shim.hello().await.unwrap().init_pid;
    let mut spec = pod.spec("c", "cat /proc/1/comm");
    spec["linux"]["namespaces"][1] = json!({ "type": "pid", "path": format!("/proc/{init}/ns/pid") });
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["coracle-init"]);
    let notes = fs::read_to_string(pod.dir.join("shim/shim.log")).unwrap();
    assert!(notes.contains("start process 1 with the SELinux label no:such:label"), "{notes}");
    pod.end().await;
}

pub(crate) async fn long_lines_are_written_in_parts(mut pod: Pod) {
    pod.run("c", "head -c 40000 /dev/zero; echo").await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    let log = fs::read_to_string(pod.log_path("c")).unwrap();
    let tags: Vec<_> = log.lines().map(|line| line.split(' ').nth(2).unwrap().to_owned()).collect();
    assert_eq!(tags, ["P", "P", "F"]);
    let length: usize = pod.output("c", "stdout").iter().map(String::len).sum();
    assert_eq!(length, 40000);
    pod.end().await;
}

pub(crate) async fn an_ordinary_user_with_a_profile_runs_without_no_new_privileges(mut pod: Pod) {
    let script = "id; grep -E 'Seccomp:|NoNewPrivs|CapEff' /proc/self/status; echo named > /dev/stdout";
    let mut spec = pod.spec("c", script);
    spec["process"]["user"] = json!({ "uid": 1000, "gid": 1000 });
    spec["process"]["noNewPrivileges"] = json!(false);
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 0, "{:?}", pod.output("c", "stderr"));
    let output = pod.output("c", "stdout").join("\n");
    for expected in ["uid=1000", "Seccomp:\t2", "NoNewPrivs:\t0", "named"] {
        assert!(output.contains(expected), "{output}");
    }
    pod.end().await;
}

pub(crate) async fn each_volume_has_its_requested_propagation(pod: Pod) {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    let volume = pod.dir.join("volume");
    ["sub", "inner"].iter().for_each(|name| fs::create_dir_all(volume.join(name)).unwrap());
    let none = None::<&str>;
    mount(Some(&volume), &volume, none, MsFlags::MS_BIND, none).unwrap();
    let script = "echo ready; until [ -e /b/go ]; do sleep 0.01; done; \
                  ls /p/sub /s/sub; mount -t tmpfs inner /b/inner; echo deep > /b/inner/file; sleep 1000";
    let mut spec = pod.spec("c", script);
    let mounts = spec["mounts"].as_array_mut().unwrap();
    for (place, propagation) in [("/p", "rprivate"), ("/s", "rslave"), ("/b", "rshared")] {
        mounts.push(json!({
            "destination": place, "type": "bind", "source": volume, "options": ["rbind", propagation],
        }));
    }
    for set in ["bounding", "effective", "permitted"] {
        spec["process"]["capabilities"][set].as_array_mut().unwrap().push(json!("CAP_SYS_ADMIN"));
    }
    pod.run_request(pod.create_request("c", &spec)).await;
    pod.until_logged("c", "ready").await;
    mount(Some("later"), &volume.join("sub"), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(volume.join("sub/seen"), "").unwrap();
    fs::write(volume.join("go"), "").unwrap();
    let inner = volume.join("inner/file");
    crate::fixture::until(|| inner.exists()).await;
    pod.until_logged("c", "seen").await;
    assert_eq!(pod.output("c", "stdout"), ["ready", "/p/sub:", "", "/s/sub:", "seen"]);
    assert_eq!(pod.output("c", "stderr"), Vec::<String>::new());
    pod.shim.delete("c").await.unwrap();
    for place in ["sub", "inner", ""] {
        umount2(&volume.join(place), MntFlags::MNT_DETACH).unwrap();
    }
    pod.end().await;
}

pub(crate) async fn a_user_namespace_is_joined_by_an_exec_too(mut pod: Pod) {
    let mut spec = pod.spec("c", "sleep 1000");
    let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
    namespaces.retain(|namespace| namespace.get("path").is_none());
    ["user", "network", "ipc", "uts"].iter().for_each(|kind| namespaces.push(json!({ "type": kind })));
    for side in ["uidMappings", "gidMappings"] {
        spec["linux"][side] = json!([{ "containerID": 0, "hostID": 100_000, "size": 65536 }]);
    }
    spec["mounts"].as_array_mut().unwrap().retain(|mount| mount["type"] != "cgroup");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(pod.dir.join("lower"), open).unwrap();
    let create = pod.create_request("c", &spec);
    std::os::unix::fs::chown(pod.dir.join("c/upper"), Some(100_000), Some(100_000)).unwrap();
    pod.run_request(create).await;
    let process = serde_json::from_value(json!({
        "user": { "uid": 0, "gid": 0 }, "args": ["cat", "/proc/self/uid_map"], "env": ["PATH=/bin"], "cwd": "/",
    }))
    .unwrap();
    let (mut read, write) = std::io::pipe().unwrap();
    let stdio =
        crate::shim_client::ExecStdio::Pipes { stdin: None, stdout: Some(write.into()), stderr: None };
    pod.shim.exec("c", "e", &process, stdio).await.unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut read, &mut text).unwrap();
    assert_eq!(text.split_whitespace().collect::<Vec<_>>(), ["0", "100000", "65536"]);
    assert_eq!(pod.exit("c", "e").await.code, 0);
    pod.end().await;
}

pub(crate) async fn a_log_is_rotated_as_it_grows_and_reopened_when_asked(mut pod: Pod) {
    let mut create = pod.create_request(
        "c",
        &pod.spec(
            "c",
            "for i in 0 1 2 3 4 5 6 7 8 9; do echo line $i; sleep 0.01; done; \
        read go; echo after",
        ),
    );
    (create.log_max_size, create.log_max_files, create.stdin) = (200, 3, true);
    pod.run_request(create).await;
    pod.until_logged("c", "line 9").await;
    let logs = || {
        let entries =
            fs::read_dir(&pod.dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        entries.filter(|name| name.starts_with("c.log")).collect::<Vec<_>>()
    };
    assert_eq!(logs().len(), 3, "{:?}", logs());
    fs::rename(pod.log_path("c"), pod.dir.join("moved")).unwrap();
    pod.shim.reopen_log("c").await.unwrap();
    let to = crate::shim_client::AttachTo { stdin: true, ..Default::default() };
    let stdin = pod.shim.attach("c", to).await.unwrap().stdin.unwrap();
    std::io::Write::write_all(&mut fs::File::from(stdin), b"\n").unwrap();
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["after"]);
    pod.end().await;
}

pub(crate) async fn a_pod_that_cannot_be_made_names_the_failed_step(pod: Pod) {
    let mut config = crate::fixture::config(&pod.dir, &pod.cgroup);
    config.sysctls.insert("net.no.such.thing".into(), "1".into());
    let dir = pod.dir.join("other");
    let error = crate::shim_client::Shim::spawn(
        &std::env::current_exe().unwrap(),
        &dir,
        config,
        crate::shim_client::Timeouts::default(),
    )
    .await
    .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Spawn);
    assert!(error.message.contains("net.no.such.thing") && error.message.contains("No such file"), "{error}");
    pod.end().await;
}

pub(crate) async fn many_containers_in_a_row_leave_memory_and_descriptors_as_they_were(mut pod: Pod) {
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let mut before = (0, 0);
    for round in 0..30 {
        let create = pod.create_request("c", &pod.spec("c", "read forever"));
        let began = Instant::now();
        pod.shim.create(create).await.unwrap();
        let created = began.elapsed();
        pod.shim.start("c").await.unwrap();
        times[0].push(created);
        times[1].push(began.elapsed());
        pod.exit("c", "").await;
        let began = Instant::now();
        pod.shim.delete("c").await.unwrap();
        times[2].push(began.elapsed());
        fs::remove_dir_all(pod.dir.join("c")).unwrap();
        if round == 9 {
            before = (memory(pod.shim.pid(), "Private_Dirty"), descriptors(pod.shim.pid()));
        }
    }
    let after = (memory(pod.shim.pid(), "Private_Dirty"), descriptors(pod.shim.pid()));
    assert!(after.0 <= before.0 + 64, "{before:?} kB and descriptors became {after:?}");
    assert_eq!(after.1, before.1);
    for (name, times) in ["created", "started", "deleted"].iter().zip(&mut times) {
        times.sort();
        println!("  {name}: {:?} least, {:?} median", times[0], times[times.len() / 2]);
    }
    let mut create = pod.create_request("d", &pod.spec("d", "exec sleep 1000"));
    create.stdin = true;
    pod.run_request(create).await;
    let pid = pod.shim.pid();
    println!("  PSS {} kB, private {} kB, RSS {} kB", memory(pid, "Pss"), after.0, memory(pid, "Rss"));
    pod.end().await;
}

fn memory(pid: i32, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.split(':').next() == Some(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn descriptors(pid: i32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

pub(crate) async fn a_full_disk_loses_complete_lines_only(mut pod: Pod) {
    use nix::mount::{MsFlags, mount, umount};
    let disk = pod.dir.join("disk");
    fs::create_dir_all(&disk).unwrap();
    // The filler makes the disk full. Without the filler there is room for all lines: a slow shim may read up to a
    // pipe's capacity of lines after the filler is removed.
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), Some("size=256k")).unwrap();
    let filler = disk.join("filler");
    fs::write(&filler, vec![0; 224 << 10]).unwrap();
    let line = "x".repeat(700);
    let script = format!(
        "i=0; while [ $i -lt 200 ]; do echo {line}; i=$((i+1)); done; echo end; : >/full; \
         until [ -e /room ]; do sleep 0.01; done; echo after; exit 3"
    );
    let mut create = pod.create_request("c", &pod.spec("c", &script));
    let log = disk.join("c.log");
    create.log_path = log.to_string_lossy().into_owned();
    let root = format!("/proc/{}/root", pod.run_request(create).await);
    let root = std::path::Path::new(&root);
    until(|| root.join("full").exists()).await;
    until(|| fs::metadata(&log).is_ok_and(|log| log.len() > 20 << 10)).await;
    let full = fs::metadata(&log).unwrap().len();
    assert!(full < 40 << 10, "{full}");
    fs::remove_file(filler).unwrap();
    fs::write(root.join("room"), "").unwrap();
    assert_eq!(pod.exit("c", "").await.code, 3);
    let text = fs::read_to_string(&log).unwrap();
    for written in text.lines() {
        let parts: Vec<&str> = written.splitn(4, ' ').collect();
        assert!(parts.len() == 4 && (parts[3] == line || ["end", "after"].contains(&parts[3])), "{written}");
    }
    assert!(text.ends_with(" stdout F after\n"), "{text}");
    pod.shim.delete("c").await.unwrap();
    umount(&disk).unwrap();
    pod.end().await;
}
