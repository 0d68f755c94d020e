//! Files that the agent writes for a pod: `/etc/hosts`, `/etc/resolv.conf`, `/etc/hostname` and termination messages.
//!
//! Containers write to these files without a limit. So the files are in the pod's directory and not among the runtime's
//! records, which are on a tmpfs. There they are on the disk and count as disk usage of the pod.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use coracle_proto::cri::{self, MountPropagation};
use k8s_openapi::api::core::v1::HostAlias;

use super::dns;
use crate::bounded;
use crate::server::logs::Line;

/// Maximum size in bytes of a termination message, and of the log lines that replace it.
const MESSAGE_BYTES: u64 = 4096;
const LOG_BYTES: u64 = 2048;
const LOG_LINES: usize = 80;
/// Bytes that are read of the end of a log. The first line may be incomplete; a line has at most 16 KiB of text. So at
/// least 15 KiB of complete lines follow. These are at least [`LOG_LINES`] lines, or they have more than [`LOG_BYTES`]
/// bytes of text in addition to time stamps and stream names.
const LOG_WINDOW: u64 = 32 << 10;
/// Maximum size in bytes of the node's hosts file.
const HOSTS_MAX: u64 = 1 << 20;
/// Maximum size in bytes of the node's resolver file. A larger file counts as empty.
const RESOLVER_MAX: u64 = 4 << 20;
/// File names in a pod's directory.
pub(crate) const HOSTS: &str = "etc-hosts";
const RESOLVER: &str = "etc-resolv.conf";
const HOST_NAME: &str = "etc-hostname";
/// Names of the files that all containers of a pod share.
pub(crate) const SHARED: [&str; 3] = [HOSTS, RESOLVER, HOST_NAME];

/// `/etc/hosts` of a pod with its own network.
pub(crate) fn hosts(ips: &[String], name: &str, domain: Option<&str>, aliases: &[HostAlias]) -> String {
    let mut text = String::from(
        "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n",
    );
    for ip in ips {
        match domain {
            Some(domain) => text.push_str(&format!("{ip}\t{name}.{domain}\t{name}\n")),
            None => text.push_str(&format!("{ip}\t{name}\n")),
        }
    }
    add_aliases(&mut text, aliases);
    text
}

/// `/etc/hosts` of a pod with the host's network.
pub(crate) fn host_hosts(host: &str, aliases: &[HostAlias]) -> String {
    let mut text = format!("# Kubernetes-managed hosts file (host network).\n{host}");
    add_aliases(&mut text, aliases);
    text
}

fn add_aliases(text: &mut String, aliases: &[HostAlias]) {
    if !aliases.is_empty() {
        text.push_str("\n# Entries added by HostAliases.\n");
    }
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        text.push_str(&format!("{}\t{names}\n", alias.ip));
    }
}

/// Writes a file that the containers of a pod share, if its content differs. The file is bind-mounted, so it is written
/// in place.
pub(crate) fn write_shared(path: &Path, text: &str) -> io::Result<()> {
    // Containers can write to the file, so at most the expected size is read.
    if bounded::read(path, text.len() as u64).is_ok_and(|now| now == text.as_bytes()) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        crate::volume::make_private(dir).map_err(cannot_write(dir))?;
    }
    overwrite(path, text.as_bytes(), 0o644)
}

/// Writes the resolver and host name files of a new sandbox. The files are not written again when a container of the
/// sandbox starts, because containers may change the files.
pub(crate) fn write_sandbox_files(dir: &Path, config: &cri::PodSandboxConfig) -> io::Result<()> {
    let own = config.dns_config.as_ref().map(dns::text).unwrap_or_default();
    let resolver = if own.is_empty() { node_resolver() } else { own };
    // Pods with the host's network have the host's name.
    let name = if config.hostname.is_empty() {
        nix::unistd::gethostname()?.to_string_lossy().into_owned()
    } else {
        config.hostname.clone()
    };
    write_shared(&dir.join(RESOLVER), &resolver)?;
    write_shared(&dir.join(HOST_NAME), &format!("{name}\n"))
}

fn node_resolver() -> String {
    let bytes = coracle_tree::read(Path::new("/etc/resolv.conf"), RESOLVER_MAX).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Mounts of the files of [`write_sandbox_files`] beside a container's other mounts. A file is left out if a volume has
/// its path, or if a bidirectional volume contains its path: the mount would appear on the host. An earlier version of
/// the agent did not write these files. Containers in sandboxes of that version get the files of the runtime.
pub(crate) fn sandbox_mounts(dir: &Path, mounts: &[cri::Mount], readonly: bool) -> Vec<cri::Mount> {
    let is_taken = |place: &str| {
        mounts.iter().any(|mount| {
            let (volume, place) = (Path::new(&mount.container_path), Path::new(place));
            let is_shared = mount.propagation() == MountPropagation::PropagationBidirectional;
            volume == place || is_shared && place.starts_with(volume)
        })
    };
    let files = [("/etc/resolv.conf", RESOLVER), ("/etc/hostname", HOST_NAME)];
    let wanted = files.into_iter().map(|(place, name)| (place, dir.join(name)));
    let wanted = wanted.filter(|(place, file)| !is_taken(place) && file.exists());
    wanted.map(|(place, file)| cri::Mount { readonly, ..bind(place, &file) }).collect()
}

/// A mount of a file of the agent.
pub(crate) fn bind(to: &str, from: &Path) -> cri::Mount {
    cri::Mount {
        container_path: to.to_owned(),
        host_path: from.to_string_lossy().into_owned(),
        selinux_relabel: true,
        ..cri::Mount::default()
    }
}

/// Names the file in an error, which becomes the message of a container that does not start.
fn cannot_write(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
}

/// Writes a regular file in place, without following a symlink.
fn overwrite(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let write = || -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let mut file = bounded::checked(options.write(true).create(true).truncate(false).mode(mode), path)?;
        let found = file.metadata()?;
        // After a truncation ext4 writes the file to the disk when it is closed. A new file needs no truncation.
        if found.len() > 0 {
            file.set_len(0)?;
        }
        file.write_all(content)?;
        match found.permissions().mode() & 0o7777 {
            same if same == mode => Ok(()),
            _ => file.set_permissions(fs::Permissions::from_mode(mode)),
        }
    };
    write().map_err(cannot_write(path))
}

/// The node's hosts file, for pods with its network. Empty if the file does not exist.
///
/// # Errors
/// When the file cannot be read or is larger than 1 MiB.
pub(crate) fn node_hosts() -> io::Result<String> {
    hosts_file(Path::new("/etc/hosts"))
}

fn hosts_file(path: &Path) -> io::Result<String> {
    match bounded::read_text(path, HOSTS_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot read the node's hosts file: {error}"))
        }),
    }
}

/// Creates the empty termination message file. The file is writable for every user that a container may run as.
pub(crate) fn make_message_file(dir: &Path, attempt: u32) -> io::Result<PathBuf> {
    crate::volume::make_private(dir).map_err(cannot_write(dir))?;
    let path = dir.join(format!("{attempt}.message"));
    overwrite(&path, b"", 0o666)?;
    if let Some(old) = attempt.checked_sub(2) {
        let _ = fs::remove_file(dir.join(format!("{old}.message")));
    }
    Ok(path)
}

/// The termination message, at most 4 KiB.
pub(crate) fn message(path: &Path) -> String {
    let Ok(file) = bounded::open(path) else { return String::new() };
    let mut bytes = Vec::new();
    let _ = file.take(MESSAGE_BYTES).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The end of a container's log without time stamps and stream names. A partial line has no line end.
pub(crate) fn log_tail(path: &Path) -> String {
    let Ok(mut file) = bounded::open(path) else { return String::new() };
    let length = file.metadata().map(|m| m.len()).unwrap_or_default();
    let skipped = length.saturating_sub(LOG_WINDOW);
    let mut bytes = Vec::new();
    if file.seek(SeekFrom::Start(skipped)).is_err() || file.take(LOG_WINDOW).read_to_end(&mut bytes).is_err()
    {
        return String::new();
    }
    let start = if skipped > 0 {
        bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1)
    } else {
        0
    };
    let lines: Vec<Line<'_>> = bytes[start..].split(|byte| *byte == b'\n').filter_map(Line::parse).collect();
    let mut tail = Vec::new();
    for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
        tail.extend_from_slice(line.text);
        tail.extend_from_slice(if line.is_partial { b"" } else { b"\n" });
    }
    let most = usize::try_from(LOG_BYTES).unwrap_or(usize::MAX);
    tail.drain(..tail.len().saturating_sub(most));
    String::from_utf8_lossy(&tail).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_file_names_the_pod_and_its_aliases() {
        let aliases = [HostAlias { ip: "1.2.3.4".into(), hostnames: Some(vec!["a".into(), "b".into()]) }];
        let text = hosts(&["10.42.0.5".into()], "web", Some("sub.ns.svc.cluster.local"), &aliases);
        assert!(text.contains("\n10.42.0.5\tweb.sub.ns.svc.cluster.local\tweb\n"));
        assert!(text.ends_with("# Entries added by HostAliases.\n1.2.3.4\ta\tb\n"));
    }

    #[test]
    fn an_error_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(HOSTS);
        fs::create_dir(&path).unwrap();
        let error = write_shared(&path, "text").unwrap_err().to_string();
        assert!(error.contains(&*path.to_string_lossy()), "{error}");
    }

    #[test]
    fn a_hosts_file_that_a_container_made_huge_is_not_read_and_a_link_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(HOSTS);
        // The file is larger than memory, but has no blocks.
        fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        write_shared(&path, "right").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "right");
        let (victim, link) = (dir.path().join("victim"), dir.path().join("link"));
        fs::write(&victim, "kept").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        assert!(write_shared(&link, "right").is_err());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        assert_eq!((message(&link), log_tail(&link)), (String::new(), String::new()));
    }

    #[test]
    fn the_resolver_and_the_host_name_of_a_sandbox_are_files_of_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        assert!(sandbox_mounts(dir.path(), &[], false).is_empty(), "a sandbox of an earlier version");
        let dns_config = cri::DnsConfig { servers: vec!["10.43.0.10".into()], ..cri::DnsConfig::default() };
        let config = cri::PodSandboxConfig {
            hostname: "web".into(),
            dns_config: Some(dns_config),
            ..cri::PodSandboxConfig::default()
        };
        write_sandbox_files(dir.path(), &config).unwrap();
        let mounts = sandbox_mounts(dir.path(), &[], true);
        assert!(mounts.iter().all(|mount| mount.readonly));
        let seen: Vec<_> = mounts
            .iter()
            .map(|mount| (mount.container_path.as_str(), fs::read_to_string(&mount.host_path).unwrap()))
            .collect();
        let wanted = [("/etc/resolv.conf", "nameserver 10.43.0.10\n"), ("/etc/hostname", "web\n")];
        assert_eq!(seen, wanted.map(|(place, text)| (place, text.to_owned())));
        // The container of an earlier sandbox made the file huge. The file has no blocks.
        fs::File::create(dir.path().join(RESOLVER)).unwrap().set_len(1 << 40).unwrap();
        write_sandbox_files(dir.path(), &config).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(RESOLVER)).unwrap(), wanted[0].1);
    }

    #[test]
    fn a_file_of_the_sandbox_is_not_mounted_on_a_volume_or_on_the_host() {
        let dir = tempfile::tempdir().unwrap();
        write_sandbox_files(dir.path(), &cri::PodSandboxConfig::default()).unwrap();
        let places = |path: &str, propagation: MountPropagation| -> Vec<String> {
            let volume = cri::Mount {
                container_path: path.to_owned(),
                propagation: propagation.into(),
                ..cri::Mount::default()
            };
            let mounts = sandbox_mounts(dir.path(), &[volume], false);
            mounts.into_iter().map(|mount| mount.container_path).collect()
        };
        let both = ["/etc/resolv.conf", "/etc/hostname"];
        assert_eq!(places("/etc", MountPropagation::PropagationPrivate), both);
        assert_eq!(places("/et", MountPropagation::PropagationBidirectional), both);
        assert_eq!(places("/etc/hostname", MountPropagation::PropagationPrivate), both[..1]);
        assert!(places("/etc", MountPropagation::PropagationBidirectional).is_empty());
    }

    #[test]
    fn an_existing_file_is_overwritten_with_content_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        for (content, wanted) in [("long content", 0o644), ("short", 0o666), ("", 0o600), ("again", 0o644)] {
            overwrite(&path, content.as_bytes(), wanted).unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), mode()), (content, wanted));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        overwrite(&path, b"x", 0o644).unwrap();
        assert_eq!(mode(), 0o644);
    }

    #[test]
    fn a_fifo_in_place_of_a_message_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.message");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!((message(&path), log_tail(&path)), (String::new(), String::new()));
        assert!(make_message_file(dir.path(), 0).is_err());
    }

    #[test]
    fn a_log_tail_has_the_text_only() {
        let path = std::env::temp_dir().join(format!("coracle-log-{}", uuid::Uuid::new_v4()));
        fs::write(&path, "2026-01-01T00:00:00Z stdout F one two\n2026-01-01T00:00:00Z stderr F three\n")
            .unwrap();
        assert_eq!(log_tail(&path), "one two\nthree\n");
        let parts = "2026-01-01T00:00:00Z stdout P on\n2026-01-01T00:00:00Z stdout F e\n";
        fs::write(&path, format!("{parts}torn\n2026-01-01T00:00:00Z stdout P DONE\n")).unwrap();
        assert_eq!(log_tail(&path), "one\nDONE", "a partial line gets no line end");
        fs::remove_file(path).unwrap();
    }

    /// The log has the parts that the shim writes: all but the last one have 16 KiB.
    #[test]
    fn a_long_last_line_is_in_the_log_tail() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let header = |tag: char| format!("2026-01-01T00:00:00.000000000Z stdout {tag} ");
        for (parts, last) in [(0, 16_300), (0, 16_384), (1, 16_384), (2, 1), (2, 7_232), (3, 16_384)] {
            for (tag, end) in [('F', "\n"), ('P', "")] {
                let part = format!("{}{}\n", header('P'), "x".repeat(16_384));
                let log = format!("{}{}{}\n", part.repeat(parts), header(tag), "y".repeat(last));
                fs::write(&path, log).unwrap();
                let tail = log_tail(&path);
                assert_eq!(tail.len(), 2048, "{parts} parts and {last} bytes, {tag}");
                let of_last = last.min(2048 - end.len());
                assert!(tail.ends_with(&format!("{}{end}", "y".repeat(of_last))), "{parts}, {last}, {tag}");
            }
        }
    }

    #[test]
    fn a_log_tail_has_few_lines_and_little_text_and_reads_the_end_of_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = |count: usize, text: &str| -> String {
            (0..count).map(|at| format!("2026-01-01T00:00:00Z stdout F {at}{text}\n")).collect()
        };
        fs::write(&path, log(5_000, "")).unwrap();
        let expected: String = (4_920..5_000).map(|at| format!("{at}\n")).collect();
        assert_eq!(log_tail(&path), expected, "80 lines");
        fs::write(&path, log(100, &"x".repeat(100))).unwrap();
        let tail = log_tail(&path);
        assert!(tail.len() == 2048 && tail.ends_with("x\n"), "{}", tail.len());
        // Without a limit the whole file, which is larger than memory and has no blocks, would be read.
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(log_tail(&path).len() <= 2048);
    }

    #[test]
    fn a_termination_message_has_at_most_4_kib() {
        let dir = tempfile::tempdir().unwrap();
        let path = make_message_file(dir.path(), 0).unwrap();
        fs::write(&path, "x".repeat(5_000)).unwrap();
        assert_eq!(message(&path), "x".repeat(4096));
    }

    #[test]
    fn a_hosts_file_of_the_node_that_is_too_large_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hosts");
        assert_eq!(hosts_file(&path).unwrap(), "", "without a file");
        fs::File::create(&path).unwrap().set_len(HOSTS_MAX + 1).unwrap();
        assert_eq!(hosts_file(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
