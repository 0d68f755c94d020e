//! `coracle check`: reports missing features of the machine and their consequences, without starting a node.
//!
//! Kernel features are tested by use: a bridge, a veth pair and an nftables table are made in a temporary network
//! namespace.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use coracle_cni::{Network, NetworkConfig, OverlayError, has_vxlan};
use coracle_cri::labels_containers;
use coracle_error_chain::chain;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::mkdtemp;
use rustix::mount::{FsOpenFlags, fsopen};
use serde::Serialize;

use super::output::{self, Format};
use crate::lock::Lock;
use crate::settings::{AllFlags, Flags, LogSettings, Node, NodeSettings, PathSettings, Settings};

/// The oldest Linux with all system calls that containers need: mount_setattr(2). close_range(2) and openat2(2) are
/// older.
const KERNEL: (u32, u32) = (5, 12);

/// Flags of `coracle check`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    #[command(flatten)]
    node: Flags<NodeSettings>,
    /// Format of the list
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// Severity of a missing feature.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// The node cannot start.
    Fatal,
    /// The node works without this ability.
    Degraded(&'static str),
}

struct Finding {
    what: String,
    severity: Severity,
    /// The reason why the feature is missing. `None` if the feature exists.
    missing: Option<String>,
}

/// A finding in the list for programs.
#[derive(Serialize)]
struct Row<'a> {
    feature: &'a str,
    /// `ok`, `lacking` (optional) or `missing` (required).
    state: &'static str,
    /// The reason why it is missing.
    reason: Option<&'a str>,
    /// The effect on the node, if the feature is missing.
    consequence: Option<&'static str>,
}

/// Prints all findings. Fails if the node cannot start.
pub(crate) fn run(arguments: Arguments, log: Flags<LogSettings>) -> anyhow::Result<ExitCode> {
    let Arguments { paths, node, output } = arguments;
    let settings = Settings::load_for_command(AllFlags { log, paths, node, ..AllFlags::default() })?;
    let findings = findings(&settings.node());
    let rows: Vec<Row<'_>> = findings.iter().map(row).collect();
    let text = output::for_programs(output, &rows)?.unwrap_or_else(|| report(&findings));
    super::print(&text)?;
    let fatal = findings.iter().any(|f| f.severity == Severity::Fatal && f.missing.is_some());
    Ok(if fatal { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn row(finding: &Finding) -> Row<'_> {
    let Finding { what, severity, missing } = finding;
    let (state, consequence) = match (missing, severity) {
        (None, _) => ("ok", None),
        (Some(_), Severity::Fatal) => ("missing", Some("the node cannot start")),
        (Some(_), Severity::Degraded(loss)) => ("lacking", Some(*loss)),
    };
    Row { feature: what, state, reason: missing.as_deref(), consequence }
}

fn report(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { what, severity, missing } in findings {
        text += &match (missing, severity) {
            (None, _) => format!("ok       {what}\n"),
            (Some(why), Severity::Fatal) => {
                format!("MISSING  {what}: {why}. The node cannot start without it.\n")
            }
            (Some(why), Severity::Degraded(loss)) => format!("lacking  {what}: {why}. Without it: {loss}.\n"),
        };
    }
    let count = |fatal: bool| {
        findings.iter().filter(|f| f.missing.is_some() && (f.severity == Severity::Fatal) == fatal).count()
    };
    let are_missing = |number: usize, kind: &str| match number {
        1 => format!("1 {kind} feature is missing"),
        _ => format!("{number} {kind} features are missing"),
    };
    text + &match (count(true), count(false)) {
        (0, 0) => "This machine has all features that a node uses.\n".to_owned(),
        (0, lacking) => format!("This machine can be a node; {}.\n", are_missing(lacking, "optional")),
        (missing, _) => {
            format!("This machine cannot be a node yet: {}.\n", are_missing(missing, "required"))
        }
    }
}

fn findings(node: &Node) -> Vec<Finding> {
    let mut all = vec![finding("root", Severity::Fatal, root())];
    if all.iter().any(|f| f.missing.is_some()) {
        return all;
    }
    all.push(kernel());
    all.extend(["net", "ipc", "uts", "pid", "mnt"].map(|name| {
        finding(&format!("{name} namespaces"), Severity::Fatal, in_kernel(&format!("/proc/self/ns/{name}")))
    }));
    all.push(finding("overlayfs", Severity::Fatal, file_system("overlay")));
    all.push(finding("tmpfs", Severity::Fatal, file_system("tmpfs")));
    all.push(finding("bridge, veth and nftables (nat, maps, fib)", Severity::Fatal, network()));
    all.extend(cgroups());
    all.extend(optional());
    for (what, dir) in [("state directory", &node.dirs.state), ("run directory", &node.dirs.run)] {
        all.push(finding(&format!("{what} {}", dir.display()), Severity::Fatal, writable(dir)));
    }
    let listen = kubelet_address(node.kubelet_listen, &node.dirs.run);
    all.push(finding(&format!("kubelet address {}", node.kubelet_listen), Severity::Fatal, listen));
    all
}

/// Whether a node can listen on the address. An address that is in use is accepted if a node with this run directory is
/// running: that node uses it.
fn kubelet_address(address: SocketAddr, run_dir: &Path) -> Result<(), String> {
    match TcpListener::bind(address) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && Lock::holder(run_dir).is_some() => Ok(()),
        bound => bound
            .map(drop)
            .map_err(|error| format!("{}; --kubelet-listen sets another address", chain(&error))),
    }
}

fn finding(what: &str, severity: Severity, result: Result<(), String>) -> Finding {
    Finding { what: what.to_owned(), severity, missing: result.err() }
}

fn root() -> Result<(), String> {
    let is_root = nix::unistd::geteuid().is_root();
    is_root.then_some(()).ok_or_else(|| "this process does not run as root; use sudo".to_owned())
}

fn kernel() -> Finding {
    let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    let new_enough = release.map_err(|errno| errno.to_string()).and_then(|release| is_new_enough(&release));
    finding(&format!("Linux {}.{} or newer", KERNEL.0, KERNEL.1), Severity::Fatal, new_enough)
}

fn is_new_enough(release: &str) -> Result<(), String> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    (version >= KERNEL).then_some(()).ok_or_else(|| format!("this is {release}"))
}

/// Whether a file exists.
fn exists(path: &str) -> Result<(), String> {
    Path::new(path).exists().then_some(()).ok_or_else(|| format!("{path} does not exist"))
}

/// Whether a file of the kernel exists, which shows that the kernel has the feature.
fn in_kernel(path: &str) -> Result<(), String> {
    exists(path).map_err(|missing| format!("the kernel does not have it, or it is disabled ({missing})"))
}

/// Whether the kernel has the file system. `/proc/filesystems` does not list a module that is not loaded. fsopen(2)
/// loads the module, as the mount of a container's root does.
fn file_system(name: &str) -> Result<(), String> {
    let known = fs::read_to_string("/proc/filesystems").map_err(|error| chain(&error))?;
    if known.lines().any(|line| line.split_whitespace().last() == Some(name)) {
        return Ok(());
    }
    let opened = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC);
    opened.map(drop).map_err(|errno| format!("the kernel cannot load {name}: {}", chain(&errno)))
}

fn cgroups() -> Vec<Finding> {
    let v2 = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let v1 = coracle_tree::read_lossy("/proc/self/mountinfo").unwrap_or_default();
    let has = |name: &str| {
        let on_v1 = v1.lines().any(|line| {
            line.contains(" - cgroup ")
                && line.rsplit(' ').next().is_some_and(|o| o.split(',').any(|c| c == name))
        });
        let found = v2.split_whitespace().any(|c| c == name) || on_v1;
        found.then_some(()).ok_or_else(|| "no mounted cgroup hierarchy has this controller".to_owned())
    };
    [
        ("memory", Severity::Fatal),
        ("cpu", Severity::Fatal),
        ("pids", Severity::Degraded("the number of a pod's processes is not limited")),
        ("cpuset", Severity::Degraded("containers cannot be bound to processors")),
        ("hugetlb", Severity::Degraded("huge pages are not limited")),
    ]
    .map(|(name, severity)| finding(&format!("cgroup controller {name}"), severity, has(name)))
    .into()
}

fn optional() -> Vec<Finding> {
    let capability = |name, cap| {
        let held = caps::has_cap(None, caps::CapSet::Effective, cap).unwrap_or(false);
        (name, held.then_some(()).ok_or_else(|| "this process does not have it".to_owned()))
    };
    let (resource, has_resource) =
        capability("capability CAP_SYS_RESOURCE", caps::Capability::CAP_SYS_RESOURCE);
    let apparmor = in_kernel("/sys/kernel/security/apparmor");
    let parser = apparmor.is_ok().then(|| {
        let severity =
            Severity::Degraded("the default AppArmor profile is not used unless another program loads it");
        let parser = exists("/sbin/apparmor_parser");
        finding(
            "apparmor_parser",
            severity,
            parser.map_err(|why| format!("{why}; install AppArmor's programs")),
        )
    });
    let selinux = exists("/sys/fs/selinux/enforce").is_ok().then(|| {
        let severity = Severity::Degraded("containers have no SELinux labels");
        let named = labels_containers()
            .then_some(())
            .ok_or_else(|| "the SELinux policy defines none (lxc_contexts)".to_owned());
        finding("SELinux labels of containers", severity, named)
    });
    let all = vec![
        finding(
            resource,
            Severity::Degraded(
                "containers cannot have a lower OOM score or higher resource limits than this process",
            ),
            has_resource,
        ),
        finding(
            "seccomp filters",
            Severity::Degraded("containers run without a system call filter"),
            in_kernel("/proc/sys/kernel/seccomp/actions_avail"),
        ),
        finding(
            "user namespaces",
            Severity::Degraded("pods with hostUsers: false are refused"),
            in_kernel("/proc/self/ns/user"),
        ),
        finding("AppArmor", Severity::Degraded("AppArmor profiles of pods are refused"), apparmor),
        finding(
            "vxlan or tun",
            Severity::Degraded("pods reach the pods of other nodes only by routes (--overlay host-gw)"),
            tunnel(has_vxlan(), Path::new("/dev/net/tun")),
        ),
    ];
    all.into_iter().chain(parser).chain(selinux).collect()
}

/// Whether the kernel has VXLAN, or the tun device by which the overlay replaces it. The device file of tun can exist
/// while its module is not loaded. Opening the file loads the module.
fn tunnel(has_vxlan: Result<bool, OverlayError>, device: &Path) -> Result<(), String> {
    if has_vxlan.map_err(|error| chain(&error))? {
        return Ok(());
    }
    let opened = OpenOptions::new().read(true).write(true).open(device);
    opened.map(drop).map_err(|error| {
        format!("the kernel has no VXLAN, and {} cannot be opened: {}", device.display(), chain(&error))
    })
}

/// Makes a pod network in a network namespace that ends with the thread.
fn network() -> Result<(), String> {
    let dir = tempdir()?;
    let tried = std::thread::scope(|scope| -> anyhow::Result<()> {
        let thread = std::thread::Builder::new().name("check".to_owned());
        let tried = thread.spawn_scoped(scope, || -> anyhow::Result<()> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let config = NetworkConfig::of_default_network(dir.clone(), dir.clone(), "check0", "check");
                Network::open(config).await?.set_pod_cidrs(vec!["10.0.0.0/24".parse()?]).await?;
                Ok(())
            })
        })?;
        tried.join().unwrap_or_else(|_| anyhow::bail!("the attempt panicked"))
    });
    drop(fs::remove_dir_all(&dir));
    tried.map_err(|error| chain(&*error))
}

/// Creates a directory that only root can enter. The name cannot be guessed. Otherwise another user could create the
/// directory before, with links that this process would follow.
fn tempdir() -> Result<std::path::PathBuf, String> {
    let template = std::env::temp_dir().join("coracle-check-XXXXXX");
    mkdtemp(&template).map_err(|errno| format!("cannot create {}: {}", template.display(), chain(&errno)))
}

/// Writes a file in the directory, and removes it. A directory that does not exist is created and removed, too.
fn writable(dir: &Path) -> Result<(), String> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|path| !path.exists()).collect();
    let probe = dir.join(".check");
    let written = fs::create_dir_all(dir)
        .and_then(|()| fs::write(&probe, b""))
        .and_then(|()| fs::remove_file(&probe))
        .map_err(|error| chain(&error));
    // Remove the deepest directory first. A directory that another process has begun to use is not empty and stays.
    for path in missing {
        drop(fs::remove_dir(path));
    }
    written
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn an_old_kernel_is_named() {
        assert_eq!(is_new_enough("5.12.0"), Ok(()));
        assert_eq!(is_new_enough("6.1.0-18-amd64"), Ok(()));
        assert_eq!(is_new_enough("5.4.0-150-generic"), Err("this is 5.4.0-150-generic".to_owned()));
    }

    #[test]
    fn a_feature_that_the_kernel_does_not_have_is_named_with_its_file() {
        assert_eq!(in_kernel("/proc/self/ns/mnt"), Ok(()));
        let missing = "the kernel does not have it, or it is disabled (/proc/self/ns/none does not exist)";
        assert_eq!(in_kernel("/proc/self/ns/none"), Err(missing.to_owned()));
    }

    #[test]
    fn a_file_system_that_the_kernel_cannot_load_is_missing() {
        assert_eq!(file_system("tmpfs"), Ok(()));
        let error = file_system("coracle-no-such-type").unwrap_err();
        assert!(error.starts_with("the kernel cannot load coracle-no-such-type: "), "{error}");
    }

    #[test]
    fn a_tunnel_needs_vxlan_or_a_tun_device() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("tun");
        assert_eq!(tunnel(Ok(true), &device), Ok(()), "the device is not needed");
        let error = tunnel(Ok(false), &device).unwrap_err();
        assert!(error.starts_with("the kernel has no VXLAN, and "), "{error}");
        fs::write(&device, b"").unwrap();
        assert_eq!(tunnel(Ok(false), &device), Ok(()));
        assert!(has_vxlan().is_ok(), "the kernel answers");
    }

    #[test]
    fn the_kubelet_address_is_not_missing_if_the_node_runs() {
        let dir = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        assert_eq!(
            kubelet_address(address, dir.path()),
            Err("Address already in use; --kubelet-listen sets another address".to_owned())
        );
        let _lock = Lock::acquire(dir.path()).unwrap();
        assert_eq!(kubelet_address(address, dir.path()), Ok(()));
    }

    #[test]
    fn the_temporary_directory_is_new_and_private() {
        let [first, second] = [tempdir().unwrap(), tempdir().unwrap()];
        let mode = first.metadata().unwrap().permissions().mode();
        for dir in [&first, &second] {
            fs::remove_dir(dir).unwrap();
        }
        assert_ne!(first, second);
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_check_leaves_no_directories() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(writable(&dir.path().join("state/more")), Ok(()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(writable(dir.path()), Ok(()));
        assert!(dir.path().exists());
    }

    #[test]
    fn the_report_names_missing_features_and_consequences() {
        let findings = [
            finding("a", Severity::Fatal, Ok(())),
            finding("b", Severity::Degraded("b's use"), Err("no b".into())),
            finding("c", Severity::Fatal, Err("no c".into())),
        ];
        let expect = "ok       a\n\
                      lacking  b: no b. Without it: b's use.\n\
                      MISSING  c: no c. The node cannot start without it.\n\
                      This machine cannot be a node yet: 1 required feature is missing.\n";
        assert_eq!(report(&findings), expect);
        let rows = serde_json::to_value(findings.each_ref().map(row)).unwrap();
        let expected = serde_json::json!([
            {"feature": "a", "state": "ok", "reason": null, "consequence": null},
            {"feature": "b", "state": "lacking", "reason": "no b", "consequence": "b's use"},
            {"feature": "c", "state": "missing", "reason": "no c", "consequence": "the node cannot start"},
        ]);
        assert_eq!(rows, expected);
    }
}
