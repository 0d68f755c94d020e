//! Adds clusters to the kubeconfig files of users, and removes them, as kind does. Other entries, the file's mode and
//! its owner are kept.
//!
//! A user can replace any file or directory below their own directory at any time, also by a link. So such files are
//! changed with that user's rights, although the command runs as root.

mod rights;

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::poll::{PollTimeout, poll};
use nix::unistd::geteuid;
use serde_json::{Value, json};

use self::rights::Rights;
use super::record::Cluster;

/// Maximum size of a kubeconfig in bytes.
const MAX_KUBECONFIG: u64 = 16 << 20;
/// Port of the API server.
const PORT: u16 = 6443;
/// The lists of a kubeconfig, and the field of their entries.
const LISTS: [(&str, &str); 3] = [("clusters", "cluster"), ("users", "user"), ("contexts", "context")];
/// Delay between attempts to lock a file, in milliseconds.
const LOCK_RETRY_MS: u8 = 20;
/// Maximum attempts to lock a file.
const LOCK_ATTEMPTS: u32 = 250;

/// URL of the cluster's API server.
pub(super) fn server(cluster: &Cluster) -> String {
    format!("https://{}", SocketAddr::new(cluster.address(1), PORT))
}

/// The kubeconfig of the cluster, for use on this machine.
pub(super) fn of(cluster: &Cluster) -> anyhow::Result<String> {
    let path = cluster.node(1).kubeconfig();
    let text = coracle_agent::read_text(&path, MAX_KUBECONFIG)
        .with_context(|| format!("cannot read {}; did the cluster start?", path.display()))?;
    let written = parse(&text).with_context(|| format!("{} is not a kubeconfig", path.display()))?;
    let own = renamed(&written, &cluster.name.context(), &server(cluster))
        .with_context(|| format!("{} is not a kubeconfig", path.display()))?;
    Ok(serde_yaml_ng::to_string(&own)?)
}

/// The file to which clusters are added: `file`; otherwise the first existing file of `KUBECONFIG`, or its last file;
/// otherwise `~/.kube/config`.
pub(super) fn target(file: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(file) = file {
        return Ok(std::path::absolute(file)?);
    }
    let listed = std::env::var_os("KUBECONFIG").unwrap_or_default();
    let home = std::env::var_os("HOME").unwrap_or_default();
    Ok(std::path::absolute(default_target(&listed, &home)?)?)
}

/// The file to which clusters are added, with these values of `KUBECONFIG` and `HOME`. A directory is not an existing
/// file, as in kind.
fn default_target(listed: &OsStr, home: &OsStr) -> anyhow::Result<PathBuf> {
    let listed: Vec<PathBuf> =
        std::env::split_paths(listed).filter(|path| !path.as_os_str().is_empty()).collect();
    let is_file = |path: &&PathBuf| path.exists() && !path.is_dir();
    if let Some(path) = listed.iter().find(is_file).or(listed.last()) {
        return Ok(path.clone());
    }
    anyhow::ensure!(!home.is_empty(), "HOME is not set; use --kubeconfig FILE");
    Ok(Path::new(home).join(".kube/config"))
}

/// Adds the cluster to the file, and makes its context the current one.
pub(super) fn add(path: &Path, cluster: &Cluster) -> anyhow::Result<()> {
    let own = parse(&of(cluster)?)?;
    let name = cluster.name.context();
    edit(path, |present| Ok(Some(merged(present.unwrap_or_else(empty), &own, &name)?)))
}

/// Removes the cluster from the file. An absent file is not an error.
pub(super) fn remove(path: &Path, cluster: &Cluster) -> anyhow::Result<()> {
    let name = cluster.name.context();
    if !path.exists() {
        return Ok(());
    }
    edit(path, |present| present.map(|present| without(present, &name)).transpose().map(Option::flatten))
}

fn empty() -> Value {
    json!({"apiVersion": "v1", "kind": "Config", "preferences": {}})
}

fn parse(text: &str) -> anyhow::Result<Value> {
    let value: Value = serde_yaml_ng::from_str(text)?;
    Ok(if value.is_null() { empty() } else { value })
}

/// A kubeconfig with the first cluster and user of another kubeconfig, under this name and with this server.
fn renamed(written: &Value, name: &str, server: &str) -> anyhow::Result<Value> {
    let first = |list: &str, field: &str| written[list][0][field].as_object().cloned();
    let mut cluster = first("clusters", "cluster").context("it has no cluster")?;
    let user = first("users", "user").context("it has no user")?;
    cluster.insert("server".to_owned(), json!(server));
    let context = json!({"cluster": name, "user": name});
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": context}],
        "current-context": name,
    }))
}

/// The kubeconfig `present` with the entries of the kubeconfig `own`, which have the name `name`. Former entries of that
/// name are removed. The current context becomes `name`.
fn merged(mut present: Value, own: &Value, name: &str) -> anyhow::Result<Value> {
    for (list, _) in LISTS {
        let entries = entries(&mut present, list)?;
        entries.retain(|entry| entry["name"] != name);
        entries.extend(own[list].as_array().into_iter().flatten().cloned());
    }
    present["current-context"] = json!(name);
    Ok(present)
}

/// A kubeconfig without the entries of this name. `None` if there are no such entries.
fn without(mut present: Value, name: &str) -> anyhow::Result<Option<Value>> {
    let before = present.clone();
    for (list, _) in LISTS {
        if !present[list].is_null() {
            entries(&mut present, list)?.retain(|entry| entry["name"] != name);
        }
    }
    if present["current-context"] == name {
        present["current-context"] = json!("");
    }
    Ok((present != before).then_some(present))
}

fn entries<'a>(config: &'a mut Value, list: &str) -> anyhow::Result<&'a mut Vec<Value>> {
    let config = config.as_object_mut().context("it is not a mapping")?;
    let entries = config.entry(list).or_insert(Value::Null);
    if entries.is_null() {
        *entries = json!([]);
    }
    entries.as_array_mut().with_context(|| format!("{list} is not a list"))
}

/// Changes a file under the lock that kubectl uses. `change` returns `None` to leave the file unchanged.
fn edit(
    path: &Path,
    change: impl FnOnce(Option<Value>) -> anyhow::Result<Option<Value>>,
) -> anyhow::Result<()> {
    let failed = || format!("cannot change the kubeconfig {}", path.display());
    let mut rights = Rights::of_owner(directory(path)).with_context(failed)?;
    // Replace the target of a symbolic link, not the link.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if rights.is_none() {
        // A symbolic link that root owns can lead to a directory of a user.
        rights = Rights::of_owner(directory(&target)).with_context(failed)?;
    }
    let context = || match &rights {
        Some(rights) => format!("{} as {rights}; use --kubeconfig FILE", failed()),
        None => failed(),
    };
    make_dir(directory(&target)).with_context(context)?;
    let _lock = Lock::acquire(&target).with_context(context)?;
    let present = match coracle_agent::read_text(&target, MAX_KUBECONFIG) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        text => Some(parse(&text.with_context(context)?).with_context(context)?),
    };
    let Some(changed) = change(present).with_context(context)? else { return Ok(()) };
    let is_root = rights.is_none() && geteuid().is_root();
    replace(&target, serde_yaml_ng::to_string(&changed)?.as_bytes(), is_root).with_context(context)
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Creates the directory of a new kubeconfig.
fn make_dir(dir: &Path) -> anyhow::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o750))?;
    Ok(())
}

/// Replaces the file atomically, and keeps its mode and, with root's rights, its owner. A new file is private.
fn replace(path: &Path, content: &[u8], is_root: bool) -> anyhow::Result<()> {
    let present = match fs::symlink_metadata(path) {
        // A dangling symbolic link is replaced. Its mode is not copied, because all links have the same mode.
        Ok(present) => Some(present).filter(fs::Metadata::is_file),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        if let Some(present) = &present {
            if is_root {
                std::os::unix::fs::fchown(&file, Some(present.uid()), Some(present.gid()))?;
            }
            // The new file's group must not get the rights of the former file's group.
            let kept = if file.metadata()?.gid() == present.gid() { 0o777 } else { 0o700 };
            file.set_permissions(fs::Permissions::from_mode(present.mode() & kept))?;
        }
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // On a full disk the incomplete file would occupy the space that other writes need.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    Ok(File::open(directory(path))?.sync_all()?)
}

/// The lock file beside a kubeconfig, as kubectl creates it. It contains the process id, so that the next command can
/// remove the lock of a killed `coracle`.
struct Lock {
    path: PathBuf,
}

impl Lock {
    fn acquire(file: &Path) -> anyhow::Result<Self> {
        let mut path = file.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        for _ in 0..LOCK_ATTEMPTS {
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(mut file) => {
                    write!(file, "coracle {}", std::process::id())?;
                    return Ok(Self { path });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("cannot create {}", path.display())),
            }
            if is_stale_lock(&path) {
                let _ = fs::remove_file(&path);
            } else {
                poll(&mut [], PollTimeout::from(LOCK_RETRY_MS))?;
            }
        }
        anyhow::bail!(
            "lock file {} exists; remove it if no other program is changing the kubeconfig",
            path.display()
        )
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Whether the lock file belongs to a `coracle` process that has ended.
fn is_stale_lock(path: &Path) -> bool {
    let text = coracle_agent::read_text(path, 64).unwrap_or_default();
    let pid = text.strip_prefix("coracle ").and_then(|pid| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use super::*;

    fn own(name: &str) -> Value {
        let written = parse(
            "clusters: [{name: coracle, cluster: {server: 'https://127.0.0.1:6443', certificate-authority-data: x}}]\n\
             users: [{name: admin, user: {client-key-data: y}}]\n",
        );
        renamed(&written.unwrap(), name, "https://198.18.1.2:6443").unwrap()
    }

    #[test]
    fn a_cluster_is_added_beside_others_and_removed() {
        let present = parse(
            "apiVersion: v1\nkind: Config\ncurrent-context: other\nextensions: [{name: kept}]\n\
             clusters: [{name: other, cluster: {server: 'https://o'}}]\nusers: null\n\
             contexts: [{name: other, context: {cluster: other, namespace: n}}]\n",
        );
        let present = present.unwrap();
        let both = merged(present.clone(), &own("coracle-a"), "coracle-a").unwrap();
        assert_eq!(both["current-context"], "coracle-a");
        assert_eq!(both["clusters"].as_array().unwrap().len(), 2);
        assert_eq!(both["clusters"][1]["cluster"]["server"], "https://198.18.1.2:6443");
        assert_eq!(both["extensions"], present["extensions"]);
        let again = merged(both.clone(), &own("coracle-a"), "coracle-a").unwrap();
        assert_eq!(again, both, "it is replaced");
        let left = without(both, "coracle-a").unwrap().unwrap();
        assert_eq!(left["clusters"], present["clusters"]);
        assert_eq!(left["contexts"], present["contexts"]);
        assert_eq!(left["current-context"], "");
        assert!(without(left, "coracle-a").unwrap().is_none(), "nothing changes");
    }

    #[test]
    fn the_first_existing_file_of_the_variable_is_chosen_else_its_last_one_else_that_of_the_home_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("directory")).unwrap();
        fs::write(path("second"), "").unwrap();
        fs::write(path("third"), "").unwrap();
        let chosen = |names: &[&str]| {
            let listed = std::env::join_paths(names.iter().map(|name| path(name))).unwrap();
            default_target(&listed, OsStr::new("/home/user")).unwrap()
        };
        assert_eq!(chosen(&["absent", "second", "third"]), path("second"));
        assert_eq!(chosen(&["directory", "third", "second"]), path("third"));
        assert_eq!(chosen(&["absent", "new"]), path("new"));
        let in_home = Path::new("/home/user/.kube/config");
        for listed in ["", ":"] {
            let home = OsStr::new("/home/user");
            assert_eq!(default_target(OsStr::new(listed), home).unwrap(), in_home);
        }
        let error = default_target(OsStr::new(""), OsStr::new("")).unwrap_err().to_string();
        assert!(error.contains("--kubeconfig"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_a_kubeconfig_is_refused() {
        assert!(merged(json!([1]), &own("a"), "a").is_err());
        assert!(merged(json!({"clusters": 7}), &own("a"), "a").is_err());
    }

    #[test]
    fn an_edited_file_keeps_its_mode_and_link_and_a_new_one_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("real"), dir.path().join("config"));
        fs::write(&file, "kind: Config\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let put = |path: &Path| {
            edit(path, |present| Ok(Some(merged(present.unwrap_or_else(empty), &own("a"), "a")?)))
        };
        put(&link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o640);
        assert_eq!(parse(&fs::read_to_string(&file).unwrap()).unwrap()["current-context"], "a");
        let new = dir.path().join("deep/config");
        put(&new).unwrap();
        assert_eq!(fs::metadata(&new).unwrap().mode() & 0o777, 0o600);
        let names = fs::read_dir(dir.path().join("deep")).unwrap().count();
        assert_eq!(names, 1, "no lock and no temporary file is left");
    }

    #[test]
    fn a_file_in_a_directory_of_a_user_is_changed_with_the_rights_of_that_user() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (home, secret) = (dir.path().join("home"), dir.path().join("secret"));
        fs::create_dir(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(4321), Some(4321)).unwrap();
        fs::create_dir(&secret).unwrap();
        fs::write(secret.join("config"), "kind: Config\n").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();
        let put = |path: &Path| {
            edit(path, |present| Ok(Some(merged(present.unwrap_or_else(empty), &own("a"), "a")?)))
        };
        let new = home.join(".kube/config");
        put(&new).unwrap();
        for path in [&new, &home.join(".kube")] {
            assert_eq!(fs::metadata(path).unwrap().uid(), 4321, "{}", path.display());
        }
        // A link does not give the user access to a file that the user cannot write.
        std::os::unix::fs::symlink(secret.join("config"), home.join("link")).unwrap();
        std::os::unix::fs::symlink(secret.join("new"), home.join("new")).unwrap();
        std::os::unix::fs::symlink(&secret, home.join("dir")).unwrap();
        std::os::unix::fs::symlink("absent", home.join("dangling")).unwrap();
        for path in ["link", "new", "dir/config"] {
            put(&home.join(path)).unwrap_err();
        }
        put(&home.join("dangling")).unwrap();
        assert_eq!(fs::read_to_string(secret.join("config")).unwrap(), "kind: Config\n");
        assert!(!secret.join("new").exists());
        let replaced = fs::symlink_metadata(home.join("dangling")).unwrap();
        assert_eq!((replaced.mode() & 0o777, replaced.uid()), (0o600, 4321));
        fs::write(secret.join("own"), "").expect("the rights of root are back");
    }

    #[test]
    fn the_lock_of_a_command_that_has_ended_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        fs::write(dir.path().join("config.lock"), format!("coracle {}", ended.id())).unwrap();
        drop(Lock::acquire(&file).unwrap());
        fs::write(dir.path().join("config.lock"), "").unwrap();
        assert!(!is_stale_lock(&dir.path().join("config.lock")), "a lock of kubectl");
    }
}
