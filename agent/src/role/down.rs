//! `coracle down`: stops the node of `up` or `agent`, and removes everything that it made.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use coracle_cri::CgroupDriver;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_proto::cri::{ListPodSandboxRequest, RemovePodSandboxRequest, StopPodSandboxRequest};
use coracle_systemd::property::v1;
use coracle_systemd::{Systemd, unit};
use coracle_tree::mountinfo::unescaped;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tonic::Request;

use super::node::{self, OpenRuntime};
use super::progress;
use crate::lock::Lock;
use crate::settings::{AllFlags, Dirs, Flags, LogSettings, NodeSettings, PathSettings, Settings};

/// Prefixes of the node's cgroups, below its root.
const OURS: [&str; 2] = ["kubepods", "coracle"];

/// Poll interval while processes end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Attempts to take the lock, with a termination of its holder before each.
const LOCK_ATTEMPTS: u32 = 3;

/// Flags of `coracle down`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    #[command(flatten)]
    node: Flags<NodeSettings>,
    /// Also remove the data that is kept across boots: images, volumes, keys and all objects of the cluster
    #[arg(long)]
    purge: bool,
}

/// Stops the process that runs the node, and removes everything that the node made. A failure is reported at the end
/// and does not stop the removal.
pub(crate) async fn run(arguments: Arguments, log: Flags<LogSettings>) -> anyhow::Result<()> {
    super::require_root()?;
    let Arguments { paths, node, purge } = arguments;
    let settings = Settings::load_for_command(AllFlags { log, paths, node, ..AllFlags::default() })?;
    let node = settings.node();
    // Without a state directory this command makes one only to search for pods.
    let was_there = node.dirs.state.exists();
    if !was_there && has_nothing_to_remove(&node.dirs)? {
        let (state, run) = (node.dirs.state.display(), node.dirs.run.display());
        return super::print(&format!("nothing to remove: there is no {state} and no {run}\n"));
    }
    let removes_data = purge || !was_there;
    let pods = remove_all(&node, removes_data).await?;
    let data = match removes_data {
        true => "No data is kept".to_owned(),
        false => {
            format!(
                "Images, volumes and objects are kept in {}; --purge removes them",
                node.dirs.state.display()
            )
        }
    };
    super::print(&format!("removed the node with {pods} pods. {data}.\n"))
}

/// Stops the node and removes everything; its state directory only with `removes_data`. Returns the number of pods.
async fn remove_all(node: &crate::settings::Node, removes_data: bool) -> anyhow::Result<usize> {
    let _cleared = progress::ClearAtEnd;
    progress::show("stopping the node");
    let lock = take_lock(&node.dirs.run).await?;
    let mut failures = Vec::new();
    let mut note = |what: &str, result: anyhow::Result<()>| {
        if let Err(error) = result {
            failures.push(format!("{what}: {error:#}"));
        }
    };
    let mut pods = 0;
    match node::open(node, None).await {
        Ok(parts) => {
            let removed = remove_pods(&parts, &node.pod_log_dir).await;
            note("pods", removed.map(|number| pods = number));
            progress::show("removing networks, mounts and cgroups");
            note("network", parts.network.remove().await.map_err(Into::into));
            note("overlay", remove_overlay(node).await);
            note("services", remove_services(node).await);
        }
        Err(error) => note("runtime", Err(error)),
    }
    let cgroups = remove_left_cgroups(&node.cgroup_root, node.cgroup_driver).await;
    if let Err(error) = cgroups {
        note("cgroups", Err(error));
        // Processes still run in the cgroups. Keep the records, because the next run needs them to find the processes.
        anyhow::bail!("cannot remove everything, and the records of pods are kept: {}", failures.join("; "));
    }
    for dir in [&node.dirs.state, &node.dirs.run] {
        note("volumes", unmount_below(dir));
    }
    let sockets = coracle_agent::remove_plugin_sockets(&node.plugin_registry_dir);
    note("sockets of device plugins", sockets.map_err(Into::into));
    // Logs of pods whose sandbox was not made, or is already removed.
    let logs = coracle_agent::remove_pod_logs(&node.pod_log_dir, &pod_uids(&node.dirs));
    note("logs", logs.with_context(|| format!("cannot remove logs in {}", node.pod_log_dir.display())));
    note("directories", remove_dir(&node.dirs.state.join("pods")));
    note("directories", remove_dir(&node.dirs.state.join("containers")));
    if removes_data {
        progress::show("removing data");
        note("directories", remove_dir(&node.dirs.state));
    }
    drop(lock);
    note("directories", remove_dir(&node.dirs.run));
    anyhow::ensure!(failures.is_empty(), "cannot remove everything: {}", failures.join("; "));
    Ok(pods)
}

/// Removes the tables of Services and network policies, and the addresses of cluster DNS.
async fn remove_services(node: &crate::settings::Node) -> anyhow::Result<()> {
    let table = crate::settings::service_table(&node.nft_table);
    let policies = crate::settings::policy_table(&node.nft_table);
    let removed = coracle_threads::spawn_blocking(move || {
        let removed = coracle_service_proxy::Proxy::remove(&table).map_err(anyhow::Error::from);
        let policies = coracle_network_policy::Enforcer::open(&policies).and_then(|mut table| table.remove());
        removed.and(policies.map_err(Into::into))
    })
    .await?;
    // The node may have run with another range of Services than this command assumes.
    let recorded = std::fs::read_to_string(coracle_agent::dns_record(&node.dirs.run)).unwrap_or_default();
    let recorded = recorded.lines().filter_map(|line| line.parse().ok());
    for address in node.dns.served_here().into_iter().chain(recorded) {
        coracle_cni::remove_host_address(address).await?;
    }
    removed
}

/// Whether there is nothing to remove, given that the state directory is absent. Pods may still run without it. Fails
/// if a running node uses the run directory, because that node has another state directory.
fn has_nothing_to_remove(dirs: &Dirs) -> anyhow::Result<bool> {
    if let Some(pid) = Lock::holder(&dirs.run) {
        let (state, run) = (dirs.state.display(), dirs.run.display());
        anyhow::bail!(
            "there is no {state}, but process {pid} uses {run}: name its state directory with --state-dir"
        );
    }
    Ok(!dirs.run.exists())
}

/// Terminates the process that locks the run directory, and takes its lock. An interrupted `coracle cluster delete`
/// leaves a process `coracle down` that also waits for the lock. If that process takes the lock first, it is terminated
/// too.
async fn take_lock(run_dir: &Path) -> anyhow::Result<Lock> {
    for _ in 1..LOCK_ATTEMPTS {
        stop_holder(run_dir).await?;
        if let Ok(lock) = Lock::acquire(run_dir) {
            return Ok(lock);
        }
    }
    stop_holder(run_dir).await?;
    Lock::acquire(run_dir)
}

/// Terminates the process that locks the run directory, and waits for its end. After the process has released the lock,
/// one of its threads may still wait in the kernel and use the image store and the pods.
async fn stop_holder(run_dir: &Path) -> anyhow::Result<()> {
    let Some(pid) = Lock::holder(run_dir) else { return Ok(()) };
    let process = rustix::process::Pid::from_raw(pid).map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    // The process has ended in the meantime.
    let Some(Ok(process)) = process else { return Ok(()) };
    // The process still holds the lock, so the descriptor does not belong to another process with the same number.
    if Lock::holder(run_dir) != Some(pid) {
        return Ok(());
    }
    match pidfd_send_signal(&process, Signal::TERM) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(errno) => return Err(errno).with_context(|| format!("cannot stop process {pid}")),
    }
    for _ in 0..1200 {
        let ended = poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO);
        if ended? > 0 {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    anyhow::bail!("process {pid} did not stop within a minute; end it and repeat the command")
}

async fn remove_overlay(node: &crate::settings::Node) -> anyhow::Result<()> {
    let Some(config) = node.overlay.clone() else { return Ok(()) };
    let mut overlay = coracle_cni::Overlay::open(config)?;
    overlay.lock_names().await?;
    Ok(overlay.remove()?)
}

/// Stops and removes all pods with their logs. Returns their number.
async fn remove_pods(parts: &OpenRuntime, log_dir: &Path) -> anyhow::Result<usize> {
    let list = parts.runtime.list_pod_sandbox(Request::new(ListPodSandboxRequest::default())).await?;
    let mut removals = tokio::task::JoinSet::new();
    let sandboxes = list.into_inner().items;
    let number = sandboxes.len();
    for sandbox in sandboxes {
        let (runtime, log_dir) = (parts.runtime.clone(), log_dir.to_owned());
        removals.spawn(async move {
            let status_message = |status: tonic::Status| anyhow::anyhow!("{}", status.message());
            let stop = StopPodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
            RuntimeService::stop_pod_sandbox(&runtime, Request::new(stop)).await.map_err(status_message)?;
            let remove = RemovePodSandboxRequest { pod_sandbox_id: sandbox.id };
            RuntimeService::remove_pod_sandbox(&runtime, Request::new(remove))
                .await
                .map_err(status_message)?;
            let Some(pod) = sandbox.metadata else { return Ok(()) };
            remove_dir(&log_dir.join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid)))
        });
    }
    let mut first = Ok(number);
    while let Some(removed) = removals.join_next().await {
        progress::show(&format!("removing pods: {} of {number}", number - removals.len()));
        first = removed?.and(first);
    }
    first
}

/// Uids of the pods that have a directory.
fn pod_uids(dirs: &Dirs) -> BTreeSet<String> {
    let places = [dirs.state.join("pods"), dirs.run.join("volumes")];
    let entries = places.iter().flat_map(std::fs::read_dir).flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Removes the node's cgroups. Waits up to five seconds until killed processes have left them.
async fn remove_left_cgroups(root: &str, driver: CgroupDriver) -> anyhow::Result<()> {
    let is_busy = |error: &anyhow::Error| {
        let kind = error.root_cause().downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        kind == Some(std::io::ErrorKind::ResourceBusy)
    };
    for _ in 0..100 {
        match remove_cgroups(root, driver) {
            Err(error) if is_busy(&error) => tokio::time::sleep(POLL_INTERVAL).await,
            removed => return removed,
        }
    }
    remove_cgroups(root, driver)
}

/// Paths of the node's cgroups in a hierarchy.
struct OwnCgroups {
    /// The parent of all.
    root: String,
    groups: [String; OURS.len()],
}

/// Removes the node's cgroups from all hierarchies, then their parents if they are empty.
fn remove_cgroups(root: &str, driver: CgroupDriver) -> anyhow::Result<()> {
    let root = root.trim_matches('/');
    let OwnCgroups { root, groups } = match driver {
        CgroupDriver::Cgroupfs => {
            OwnCgroups { root: root.to_owned(), groups: OURS.map(|group| format!("{root}/{group}")) }
        }
        CgroupDriver::Systemd => remove_slices(root)?,
    };
    let mounts = coracle_tree::read_lossy("/proc/self/mountinfo")?;
    for (hierarchy, is_systemds) in mounts.lines().filter_map(hierarchy) {
        for group in &groups {
            let cgroup = below(&hierarchy, group);
            coracle_tree::cgroup::remove(&cgroup)
                .with_context(|| format!("cannot remove {}", cgroup.display()))?;
        }
        if driver == CgroupDriver::Cgroupfs || !is_systemds {
            // A parent with other cgroups in it cannot be removed and stays.
            let mut made = below(&hierarchy, &root);
            while made != hierarchy && std::fs::remove_dir(&made).is_ok() && made.pop() {}
        }
    }
    Ok(())
}

/// Stops the node's slices with everything in them. Returns their cgroup paths, for hierarchies that systemd does not
/// manage.
fn remove_slices(root: &str) -> anyhow::Result<OwnCgroups> {
    let mut systemd = Systemd::connect()?;
    let names: Vec<&str> =
        root.trim_end_matches(".slice").split('-').filter(|name| !name.is_empty()).collect();
    let slices = OURS.map(|group| unit::slice_of(names.iter().copied().chain([group])));
    for slice in &slices {
        systemd.stop(slice)?;
    }
    let root = unit::slice_path(&unit::slice_of(names));
    Ok(OwnCgroups { root, groups: slices.map(|slice| unit::slice_path(&slice)) })
}

/// Mount point of the cgroup hierarchy in a line of mountinfo, and whether systemd removes its cgroups.
fn hierarchy(line: &str) -> Option<(PathBuf, bool)> {
    let (mount, rest) = line.split_once(" - cgroup")?;
    let options = rest.rsplit(' ').next().unwrap_or_default();
    Some((unescaped(mount.split(' ').nth(4)?), rest.starts_with('2') || v1::manages(options)))
}

fn below(hierarchy: &Path, group: &str) -> PathBuf {
    hierarchy.join(group.trim_start_matches('/'))
}

/// Unmounts everything below `dir`, the deepest first. `dir` itself may be a mount of the user, such as a disk for the
/// state, and is kept.
fn unmount_below(dir: &Path) -> anyhow::Result<()> {
    // The mount table contains paths without symbolic links.
    let Ok(dir) = dir.canonicalize() else { return Ok(()) };
    coracle_agent::volume::isolate_parts(&dir)?;
    let table = coracle_tree::read_lossy("/proc/self/mountinfo")?;
    for point in mount_points_below(&table, &dir) {
        match nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH) {
            // The unmount of another mount of the same peer group has removed this one, for example if the directory is
            // bind-mounted over itself.
            Err(nix::errno::Errno::EINVAL) => {}
            unmounted => unmounted.with_context(|| format!("cannot unmount {}", point.display()))?,
        }
    }
    Ok(())
}

/// The mount points below `dir`, the deepest first. `table` is the text of mountinfo.
fn mount_points_below(table: &str, dir: &Path) -> Vec<PathBuf> {
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let mut points: Vec<PathBuf> = points.filter(|point| point.starts_with(dir) && point != dir).collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.as_os_str().len()));
    points
}

fn remove_dir(dir: &Path) -> anyhow::Result<()> {
    use std::io::ErrorKind::{ReadOnlyFilesystem, ResourceBusy};
    match coracle_tree::remove(dir) {
        // A mount point of the user cannot be removed, and stays as an empty directory. The kernel returns EBUSY, or
        // EROFS on a read-only root.
        Err(error) if matches!(error.kind(), ResourceBusy | ReadOnlyFilesystem) && is_empty(dir) => Ok(()),
        removed => removed.with_context(|| format!("cannot remove {}", dir.display())),
    }
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[tokio::test]
    async fn a_process_that_released_the_lock_is_awaited_until_its_end() {
        let dir = tempfile::tempdir().expect("directory");
        // The script behaves like a process that releases its lock before it has finished.
        let script = "exec 9>>coracle.lock; flock -x 9; echo $$ >coracle.lock; \
                      trap 'exec 9>&-; sleep 1; exit 0' TERM; echo; while :; do sleep 0.05; done";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir.path());
        let mut holder = command.stdout(Stdio::piped()).spawn().expect("sh");
        let mut ready = [0];
        holder.stdout.take().expect("output").read_exact(&mut ready).expect("it has the lock");
        stop_holder(dir.path()).await.expect("stopped");
        let ended = holder.try_wait().expect("wait");
        drop(holder.kill());
        assert!(ended.is_some(), "the process still runs");
        stop_holder(dir.path()).await.expect("no process holds the lock");
    }

    #[tokio::test]
    async fn a_process_that_takes_the_lock_of_the_terminated_one_is_terminated_too() {
        let dir = tempfile::tempdir().expect("directory");
        // The child inherits the lock. It is the holder as soon as its parent ends.
        let script = "exec 9>>coracle.lock; flock -x 9; sleep 1000 & child=$!; echo $$ >coracle.lock; \
                      trap 'echo $child >coracle.lock; exit 0' TERM; echo; while :; do sleep 0.05; done";
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(dir.path());
        let mut holder = command.stdout(Stdio::piped()).spawn().expect("sh");
        let mut ready = [0];
        holder.stdout.take().expect("output").read_exact(&mut ready).expect("it has the lock");
        let lock = take_lock(dir.path()).await;
        drop(holder.wait());
        drop(lock.expect("both are terminated"));
    }

    #[test]
    fn pods_are_found_by_their_directories() {
        let dir = tempfile::tempdir().expect("directory");
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        assert!(pod_uids(&dirs).is_empty());
        for path in [dirs.state.join("pods/1"), dirs.run.join("volumes/2")] {
            std::fs::create_dir_all(path).expect("directories");
        }
        assert_eq!(pod_uids(&dirs), BTreeSet::from(["1", "2"].map(str::to_owned)));
    }

    #[test]
    fn mount_points_below_a_directory_with_a_blank_are_found() {
        let table = "30 1 8:0 / / rw - ext4 /dev/sda rw\n31 30 0:28 / /a\\040b rw - tmpfs x rw\n\
                     32 31 0:29 / /a\\040b/c rw - tmpfs x rw\n33 32 0:30 / /a\\040b/c/d rw - tmpfs x rw\n\
                     34 30 0:31 / /a rw - tmpfs x rw\n";
        let found = mount_points_below(table, Path::new("/a b"));
        assert_eq!(found, [Path::new("/a b/c/d"), Path::new("/a b/c")]);
    }

    #[test]
    fn mounts_below_a_symbolic_link_are_unmounted() {
        let dir = tempfile::tempdir().expect("directory");
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        let point = real.join("pods");
        std::fs::create_dir_all(&point).expect("mount point");
        std::os::unix::fs::symlink(&real, &link).expect("link");
        let none = None::<&str>;
        nix::mount::mount(Some("tmpfs"), &point, Some("tmpfs"), nix::mount::MsFlags::empty(), none)
            .expect("this test needs root");
        let unmounted = unmount_below(&link);
        let left = nix::mount::umount2(&point, nix::mount::MntFlags::MNT_DETACH);
        unmounted.expect("unmounted");
        assert_eq!(left, Err(nix::errno::Errno::EINVAL), "nothing is mounted any more");
    }

    #[test]
    fn mounts_below_a_directory_that_is_mounted_over_itself_are_unmounted() {
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        let dir = tempfile::tempdir().expect("directory");
        let (top, point) = (dir.path(), dir.path().join("pods"));
        std::fs::create_dir(&point).expect("mount point");
        let none = None::<&str>;
        let bind = || mount(Some(top), top, none, MsFlags::MS_BIND, none).expect("this test needs root");
        bind();
        mount(none, top, none, MsFlags::MS_SHARED, none).expect("shared");
        bind();
        // The mount propagates to the other mount of the peer group.
        mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), none).expect("tmpfs");
        let unmounted = unmount_below(top);
        for _ in 0..2 {
            umount2(top, MntFlags::MNT_DETACH).expect("unmounted");
        }
        unmounted.expect("unmounted");
    }

    #[test]
    fn a_mount_point_on_a_read_only_root_is_kept_empty() {
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        let dir = tempfile::tempdir().expect("directory");
        let state = dir.path().join("state");
        let none = None::<&str>;
        let tmpfs = |point: &Path| {
            mount(Some("tmpfs"), point, Some("tmpfs"), MsFlags::empty(), none).expect("this test needs root");
        };
        tmpfs(dir.path());
        std::fs::create_dir(&state).expect("mount point");
        tmpfs(&state);
        std::fs::write(state.join("file"), "").expect("file");
        let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, dir.path(), none, read_only, none).expect("read-only");
        let removed = remove_dir(&state);
        let is_kept_empty = is_empty(&state);
        for point in [state.as_path(), dir.path()] {
            umount2(point, MntFlags::MNT_DETACH).expect("unmounted");
        }
        removed.expect("removed");
        assert!(is_kept_empty);
    }

    #[test]
    fn hierarchies_managed_by_systemd_are_recognized() {
        let line = |options: &str| format!("30 29 0:27 / /sys/fs/cgroup/x rw,nosuid shared:9 - {options}");
        let is_systemds = |options: &str| hierarchy(&line(options)).map(|(_, is_systemds)| is_systemds);
        assert_eq!(is_systemds("cgroup2 cgroup2 rw,nsdelegate"), Some(true));
        assert_eq!(is_systemds("cgroup cgroup rw,cpu,cpuacct"), Some(true));
        assert_eq!(is_systemds("cgroup cgroup rw,xattr,name=systemd"), Some(true));
        assert_eq!(is_systemds("cgroup cgroup rw,cpuset"), Some(false));
        assert_eq!(is_systemds("tmpfs tmpfs rw"), None);
        assert_eq!(
            hierarchy(&line("cgroup cgroup rw,cpuset")).map(|(at, _)| at),
            Some(PathBuf::from("/sys/fs/cgroup/x"))
        );
    }
}
