//! A container's root file system: its content, and that no link of an image leads out of it.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;

use crate::fixture::Pod;

pub(crate) async fn a_link_in_an_image_cannot_redirect_a_mount(mut pod: Pod) {
    let (outside, volume) = (pod.dir.join("outside"), pod.dir.join("volume"));
    [&outside, &volume].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
    fs::write(volume.join("file"), "volume").unwrap();
    // The pod's directory as a path inside the container. Links to paths of the host must resolve there.
    let inside = pod.dir.strip_prefix("/").unwrap();
    fs::create_dir_all(pod.dir.join("lower").join(inside)).unwrap();
    symlink(format!("../../../../../../..{}", pod.dir.display()), pod.dir.join("lower/up")).unwrap();
    symlink(&outside, pod.dir.join("lower/away")).unwrap();
    let mut spec = pod.spec("c", &format!("cat {}/deep/file", outside.display()));
    let mut volume = json!({ "type": "bind", "source": volume, "options": ["rbind", "ro"] });
    volume["destination"] = json!("/up/outside/deep");
    spec["mounts"].as_array_mut().unwrap().push(volume);
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 0);
    assert_eq!(pod.output("c", "stdout"), ["volume"]);
    // A link to a path that exists on the host only: its target is made in the container.
    spec["mounts"].as_array_mut().unwrap().last_mut().unwrap()["destination"] = json!("/away/x");
    spec["process"]["args"] = json!(["cat", format!("{}/x/file", outside.display())]);
    pod.run_request(pod.create_request("d", &spec)).await;
    assert_eq!(pod.exit("d", "").await.code, 0);
    assert_eq!(pod.output("d", "stdout"), ["volume"]);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "the host's directory stays as it is");
    pod.end().await;
}

pub(crate) async fn masked_paths_are_empty_and_read_only_paths_cannot_be_written(mut pod: Pod) {
    let script = "cat /proc/version | wc -c; ls -A /proc/fs /etc | wc -l; echo x > /proc/sys/kernel/domainname; \
                  chmod 666 /proc/version; echo x > /etc/x; mkdir /new; grep -c ' / ro' /proc/self/mountinfo";
    let mut spec = pod.spec("c", script);
    spec["linux"]["maskedPaths"] = json!(["/proc/version", "/proc/fs", "/etc", "/proc/absent"]);
    spec["linux"]["readonlyPaths"] = json!(["/proc/sys", "/absent"]);
    spec["root"]["readonly"] = json!(true);
    pod.run_request(pod.create_request("c", &spec)).await;
    pod.exit("c", "").await;
    let lines = pod.output("c", "stdout");
    assert_eq!(lines[0], "0", "{lines:?}");
    let errors = pod.output("c", "stderr").join("\n");
    // The mask of a file is the host's /dev/null, whose mode must not change.
    for path in ["/proc/sys/kernel/domainname", "/proc/version", "/etc/x", "/new"] {
        let line = errors.lines().find(|line| line.contains(path)).unwrap_or_default();
        assert!(line.contains("Read-only file system"), "{path}: {errors}");
    }
    assert_eq!(lines.last().map(String::as_str), Some("1"), "{lines:?}");
    pod.end().await;
}

pub(crate) async fn nothing_but_proc_is_mounted_at_proc(pod: Pod) {
    let mut spec = pod.spec("c", "true");
    let mounts = spec["mounts"].as_array_mut().unwrap();
    mounts.push(json!({ "destination": "/proc/sys", "type": "tmpfs", "source": "tmpfs" }));
    let refused = pod.shim.create(pod.create_request("c", &spec)).await.unwrap_err();
    assert!(refused.message.contains("/proc/sys"), "{refused}");
    pod.end().await;
}

pub(crate) async fn a_container_with_hooks_is_made_by_the_library_and_behaves_the_same(mut pod: Pod) {
    let mark = pod.dir.join("mark");
    let mut spec = pod.spec("c", "hostname; cat /proc/self/oom_score_adj; exit 5");
    let touch = json!({ "path": "/bin/busybox", "args": ["busybox", "touch", mark] });
    spec["hooks"] = json!({ "createRuntime": [touch] });
    pod.run_request(pod.create_request("c", &spec)).await;
    assert_eq!(pod.exit("c", "").await.code, 5);
    assert_eq!(pod.output("c", "stdout"), ["the-pod", "100"]);
    assert!(mark.exists());
    pod.end().await;
}
