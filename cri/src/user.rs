//! Resolves the user and groups of a container's process, by number or by the image's `/etc/passwd` and `/etc/group`.

use std::io::Read;
use std::path::{Path, PathBuf};

use coracle_proto::cri::{LinuxContainerSecurityContext, SupplementalGroupsPolicy};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat};
use nix::sys::stat::Mode;

/// Maximum bytes read from an account file.
const LIMIT: u64 = 4 << 20;

/// Maximum symbolic links on the way to an account file: the kernel's limit.
const MAX_LINKS: usize = 40;

/// Maximum names that the kernel looks up in layers for one file. Links can lead through thousands of directories, each of
/// which is searched in hundreds of layers.
const MAX_LOOKUPS: usize = 50_000;

/// Maximum groups of an image's `/etc/group` that have one user as a member.
const MAX_GROUPS: usize = 1_000;

/// An entry of an image.
enum Entry {
    Directory,
    File(String),
    Link(String),
}

/// A resolved user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// All groups, the primary group first.
    pub(crate) groups: Vec<u32>,
}

/// An image's account files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Accounts {
    passwd: String,
    group: String,
}

/// An account of `/etc/passwd`.
struct Account {
    /// Empty for a numeric user without an account.
    name: String,
    uid: u32,
    /// The account's own group.
    gid: u32,
}

/// A group of `/etc/group`.
struct Group<'a> {
    name: &'a str,
    gid: u32,
    /// Names of the members, separated by commas.
    members: &'a str,
}

// === impl Accounts ===

impl Accounts {
    /// Reads the account files from unpacked layers, topmost first. An absent file is empty.
    pub(crate) fn read(layers: &[PathBuf]) -> Self {
        Self { passwd: topmost(layers, "etc/passwd"), group: topmost(layers, "etc/group") }
    }

    /// Whether a file is empty, because the image does not have it or it could not be read.
    pub(crate) fn lacks_file(&self) -> bool {
        self.passwd.is_empty() || self.group.is_empty()
    }

    /// Size of both files in bytes.
    pub(crate) fn size(&self) -> usize {
        self.passwd.len() + self.group.len()
    }

    fn user(&self, matches: impl Fn(&str, u32) -> bool) -> Option<Account> {
        self.passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let (name, uid, gid) = (fields.next()?, own_id(fields.nth(1)?)?, own_id(fields.next()?)?);
            matches(name, uid).then(|| Account { name: name.to_owned(), uid, gid })
        })
    }

    fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, gid) = (fields.next()?, own_id(fields.nth(1)?)?);
            Some(Group { name, gid, members: fields.next().unwrap_or_default() })
        })
    }

    /// Resolves the user. The request's user has precedence over the image's user. The user's own group is used unless
    /// another group is requested.
    pub(crate) fn resolve(
        &self,
        security: Option<&LinuxContainerSecurityContext>,
        image_user: &str,
    ) -> Result<User, String> {
        let none = LinuxContainerSecurityContext::default();
        let security = security.unwrap_or(&none);
        let text = match (&security.run_as_user, security.run_as_username.as_str()) {
            (Some(uid), _) => uid.value.to_string(),
            (None, "") => String::new(),
            (None, name) => name.to_owned(),
        };
        if text.is_empty() && security.run_as_group.is_some() {
            return Err("run_as_group is set without a user".to_owned());
        }
        let (user, group) = if text.is_empty() {
            let (user, group) = image_user.split_once(':').unwrap_or((image_user, ""));
            (user.to_owned(), group.to_owned())
        } else {
            (text, String::new())
        };
        let Account { name, uid, gid: own_group } = self.find_user(&user)?;
        let gid = match &security.run_as_group {
            Some(gid) => id(gid.value)?,
            None if group.is_empty() => own_group,
            None => self.find_group(&group)?,
        };
        let mut groups = vec![gid];
        if security.supplemental_groups_policy() == SupplementalGroupsPolicy::Merge && !name.is_empty() {
            groups.extend(self.groups().filter(|group| has(group.members, &name)).map(|group| group.gid));
            if groups.len() > MAX_GROUPS {
                return Err(format!("the image has user {name:?} in more than {MAX_GROUPS} groups"));
            }
        }
        for gid in &security.supplemental_groups {
            groups.push(id(*gid)?);
        }
        let mut seen = std::collections::HashSet::new();
        groups.retain(|gid| seen.insert(*gid));
        Ok(User { uid, gid, groups })
    }

    /// The account of a user, by number or name. An empty text means root.
    fn find_user(&self, user: &str) -> Result<Account, String> {
        let user = if user.is_empty() { "0" } else { user };
        if let Some(uid) = numeric(user) {
            let uid = uid?;
            let known = self.user(|_, other| other == uid);
            return Ok(known.unwrap_or(Account { name: String::new(), uid, gid: 0 }));
        }
        self.user(|name, _| name == user).ok_or_else(|| format!("the image has no user {user:?}"))
    }

    fn find_group(&self, group: &str) -> Result<u32, String> {
        if let Some(gid) = numeric(group) {
            return gid;
        }
        let found = self.groups().find(|one| one.name == group).map(|one| one.gid);
        found.ok_or_else(|| format!("the image has no group {group:?}"))
    }
}

fn has(members: &str, name: &str) -> bool {
    members.split(',').any(|member| member.trim() == name)
}

/// Fuzz target: account files of an image. No resolved id is the highest number, which the kernel takes for
/// "unchanged". The input is the image's user, `/etc/passwd` and `/etc/group`, with a zero byte between them.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use coracle_proto::cri::Int64Value;
    let text = String::from_utf8_lossy(data);
    let mut parts = text.splitn(3, '\0').map(str::to_owned);
    let mut next = || parts.next().unwrap_or_default();
    let (user, accounts) = (next(), Accounts { passwd: next(), group: next() });
    let by_number =
        LinuxContainerSecurityContext { run_as_user: Some(Int64Value { value: 1000 }), ..Default::default() };
    let by_name = LinuxContainerSecurityContext { run_as_username: user.clone(), ..Default::default() };
    for security in [None, Some(&by_number), Some(&by_name)] {
        let Ok(found) = accounts.resolve(security, &user) else { continue };
        assert_eq!(found.groups.first(), Some(&found.gid));
        assert!(found.uid != u32::MAX && !found.groups.contains(&u32::MAX), "{found:?}");
    }
}

/// Parses an id of an account file. `None` if no process can have it.
fn own_id(text: &str) -> Option<u32> {
    text.parse().ok().and_then(|number| id(number).ok())
}

/// Validates an id. The kernel takes the highest number for "unchanged": the process would stay root.
pub(crate) fn id(number: i64) -> Result<u32, String> {
    let id = u32::try_from(number).ok().filter(|id| *id != u32::MAX);
    id.ok_or_else(|| format!("id {number} is out of range"))
}

/// Parses a numeric id. A number that is too large is an error, not a user name that the image's accounts could map.
fn numeric(text: &str) -> Option<Result<u32, String>> {
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().map_err(|_too_large| format!("id {text} is out of range")).and_then(id))
}

/// The text of `path` in an overlay of `layers`. Empty if it is absent, not a readable file, or behind too many directories.
fn topmost(layers: &[PathBuf], path: &str) -> String {
    let mut left: Vec<String> = parts(path).collect();
    left.reverse();
    // The resolved path from the root, without links.
    let mut resolved: Vec<String> = Vec::new();
    let (mut links, mut lookups) = (0, MAX_LOOKUPS);
    while let Some(part) = left.pop() {
        match part.as_str() {
            "." => {}
            // The parent of the root is the root.
            ".." => drop(resolved.pop()),
            _ => {
                resolved.push(part);
                match find_entry(layers, &resolved, &mut lookups).ok().flatten() {
                    None => return String::new(),
                    Some(Entry::Directory) => {}
                    Some(Entry::File(text)) if left.is_empty() => return text,
                    Some(Entry::File(_)) => return String::new(),
                    Some(Entry::Link(target)) => {
                        links += 1;
                        if links > MAX_LINKS {
                            return String::new();
                        }
                        resolved.pop();
                        if target.starts_with('/') {
                            resolved.clear();
                        }
                        let mut target: Vec<String> = parts(&target).collect();
                        target.reverse();
                        left.append(&mut target);
                    }
                }
            }
        }
    }
    String::new()
}

/// Target of a symbolic link in an overlay of `layers`. `None` if there is no link at this path. Links on the way to it are not
/// followed.
///
/// # Errors
/// See [`find_entry`].
pub(crate) fn link_target(layers: &[PathBuf], path: &str) -> Result<Option<String>, Errno> {
    let path: Vec<String> = parts(path).collect();
    let mut lookups = MAX_LOOKUPS;
    Ok(match find_entry(layers, &path, &mut lookups)? {
        Some(Entry::Link(target)) => Some(target),
        Some(Entry::Directory | Entry::File(_)) | None => None,
    })
}

fn parts(path: &str) -> impl Iterator<Item = String> {
    path.split('/').filter(|part| !part.is_empty()).map(str::to_owned)
}

/// The entry of an overlay at a path whose parents are directories. Each name that is looked up decreases `lookups`.
///
/// # Errors
/// If a layer cannot be searched, for example because this process has no free descriptor, or no lookups are left.
fn find_entry(layers: &[PathBuf], resolved: &[String], lookups: &mut usize) -> Result<Option<Entry>, Errno> {
    let path: PathBuf = resolved.iter().collect();
    for layer in layers {
        subtract_lookups(lookups, resolved.len())?;
        match within(layer, &path) {
            Ok(entry) => return Ok(Some(entry)),
            Err(Errno::ENOENT) => {}
            // A whiteout, or a parent that is not a directory in this layer, hides lower layers. EINVAL: the target of
            // a link is not UTF-8.
            Err(Errno::ENXIO | Errno::ENOTDIR | Errno::ELOOP | Errno::EINVAL) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        if is_hidden_below(layer, resolved, lookups)? {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Whether a parent of the path is opaque in this layer: it hides lower layers.
fn is_hidden_below(layer: &Path, resolved: &[String], lookups: &mut usize) -> Result<bool, Errno> {
    let mut dir = layer.to_owned();
    let parents = resolved.iter().take(resolved.len().saturating_sub(1));
    for (above, part) in parents.enumerate() {
        subtract_lookups(lookups, above + 1)?;
        dir.push(part);
        // The parents are not links in the topmost layer that has them: links were resolved before.
        if !std::fs::symlink_metadata(&dir).is_ok_and(|metadata| metadata.is_dir()) {
            return Ok(false);
        }
        if xattr::get(&dir, "trusted.overlay.opaque").ok().flatten().as_deref() == Some(b"y") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Subtracts a number of lookups from the lookups that are left.
fn subtract_lookups(lookups: &mut usize, names: usize) -> Result<(), Errno> {
    *lookups = lookups.checked_sub(names).ok_or(Errno::E2BIG)?;
    Ok(())
}

/// The entry at a path of one layer. Only the last component may be a link.
fn within(root: &Path, path: &Path) -> Result<Entry, Errno> {
    let root = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS;
    let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC).resolve(resolve);
    let there = std::fs::File::from(openat2(&root, path, how)?);
    let kind = there.metadata().map_err(|_gone| Errno::EIO)?.file_type();
    if kind.is_dir() {
        return Ok(Entry::Directory);
    }
    if kind.is_symlink() {
        let target = readlinkat(&there, "")?;
        return target.into_string().map(Entry::Link).map_err(|_no_text| Errno::EINVAL);
    }
    if !kind.is_file() {
        return Err(Errno::ENXIO);
    }
    let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).resolve(resolve);
    let file = std::fs::File::from(openat2(&root, path, how)?);
    let mut bytes = Vec::new();
    file.take(LIMIT).read_to_end(&mut bytes).map_err(|_unreadable| Errno::EIO)?;
    Ok(Entry::File(String::from_utf8_lossy(&bytes).into_owned()))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::Int64Value;

    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: "root:x:0:0::/root:/bin/sh\nwww-data:x:33:33::/:/bin/sh\nalice:x:1000:1001::/:/bin/sh\n"
                .into(),
            group: "root:x:0:\nwww-data:x:33:\naudio:x:29:alice,bob\nextra:x:50000:alice\n".into(),
        }
    }

    fn number(value: i64) -> Option<Int64Value> {
        Some(Int64Value { value })
    }

    fn user(uid: u32, gid: u32, groups: &[u32]) -> Result<User, String> {
        Ok(User { uid, gid, groups: groups.to_vec() })
    }

    /// The kernel takes the last id for "leave it as it is": the container would run as root.
    #[test]
    fn cve_2026_46680_a_number_beyond_all_ids_is_not_an_account_name() {
        for number in ["4294967295", "4294967296", "9223372036854775808", "-1", "+99999999999999999999"] {
            let line = format!("{number}:x:0:0::/:\n");
            let accounts = Accounts { passwd: line.clone(), group: line };
            assert!(accounts.resolve(None, number).is_err(), "{number}");
            assert!(accounts.resolve(None, &format!("1000:{number}")).is_err(), "{number}");
        }
        assert_eq!(
            Accounts::default().resolve(None, "1000:7").map(|user| (user.uid, user.gid)),
            Ok((1000, 7))
        );
    }

    #[test]
    fn the_highest_32_bit_number_is_not_an_id() {
        let accounts = Accounts {
            passwd: "last:x:4294967295:0::/:\ngroup:x:7:4294967295::/:\ngood:x:1000:1001::/:\n".into(),
            group: "last:x:4294967295:good\n".into(),
        };
        assert!(accounts.resolve(None, "last").is_err());
        assert!(accounts.resolve(None, "group").is_err());
        assert!(accounts.resolve(None, "good:last").is_err());
        assert_eq!(accounts.resolve(None, "good").unwrap().groups, [1001]);
    }

    #[test]
    fn image_users_are_resolved_by_name_and_number() {
        let accounts = accounts();
        assert_eq!(accounts.resolve(None, ""), user(0, 0, &[0]));
        assert_eq!(accounts.resolve(None, "alice"), user(1000, 1001, &[1001, 29, 50000]));
        assert_eq!(accounts.resolve(None, "1003:1004"), user(1003, 1004, &[1004]));
        assert_eq!(accounts.resolve(None, "www-data:1004"), user(33, 1004, &[1004]));
        assert_eq!(accounts.resolve(None, "alice:audio"), user(1000, 29, &[29, 50000]));
        assert!(accounts.resolve(None, "nobody").is_err());
        assert!(accounts.resolve(None, "4294967295").is_err(), "setresuid(2) ignores this id");
        assert!(accounts.resolve(None, "1:4294967295").is_err());
    }

    #[test]
    fn the_request_has_precedence_over_the_image() {
        let accounts = accounts();
        let mut security = LinuxContainerSecurityContext { run_as_user: number(1000), ..Default::default() };
        assert_eq!(accounts.resolve(Some(&security), "www-data:33"), user(1000, 1001, &[1001, 29, 50000]));
        security.run_as_group = number(7);
        security.supplemental_groups = vec![8, 29];
        assert_eq!(accounts.resolve(Some(&security), ""), user(1000, 7, &[7, 29, 50000, 8]));
        security.set_supplemental_groups_policy(SupplementalGroupsPolicy::Strict);
        assert_eq!(accounts.resolve(Some(&security), ""), user(1000, 7, &[7, 8, 29]));
        security.run_as_user = None;
        assert!(accounts.resolve(Some(&security), "").is_err(), "a group without a user");
    }

    #[test]
    fn a_user_in_very_many_groups_of_an_image_is_refused() {
        let lines = |number: usize| -> String {
            (0..number).map(|gid| format!("g:x:{}:alice\n", 5000 + gid)).collect()
        };
        let found = |number: usize| Accounts { group: lines(number), ..accounts() }.resolve(None, "alice");
        assert_eq!(found(MAX_GROUPS - 1).map(|user| user.groups.len()), Ok(MAX_GROUPS));
        assert!(found(MAX_GROUPS).is_err());
        let numeric = Accounts { group: lines(MAX_GROUPS), ..accounts() }.resolve(None, "5:6");
        assert!(numeric.is_ok(), "a user without a name has no groups of the image");
    }

    #[test]
    fn account_files_are_read_topmost_first_and_never_from_outside() {
        let dir = tempfile::tempdir().expect("directory");
        let (top, low) = (dir.path().join("top"), dir.path().join("low"));
        std::fs::create_dir_all(top.join("etc")).expect("directory");
        std::fs::create_dir_all(low.join("etc")).expect("directory");
        std::fs::write(low.join("etc/passwd"), "low:x:1:1::/:").expect("write");
        let layers = [top.clone(), low.clone()];
        assert_eq!(topmost(&layers, "etc/passwd"), "low:x:1:1::/:");
        std::fs::write(dir.path().join("secret"), "out").expect("write");
        std::os::unix::fs::symlink("../../secret", top.join("etc/passwd")).expect("link");
        assert_ne!(topmost(&layers, "etc/passwd"), "out");
    }

    #[test]
    fn account_files_are_found_by_links_through_all_layers() {
        let dir = tempfile::tempdir().expect("directory");
        let [top, middle, low] = ["top", "middle", "low"].map(|name| dir.path().join(name));
        let layers = [top.clone(), middle.clone(), low.clone()];
        for path in [top.join("etc"), middle.join("usr"), low.join("usr/lib"), low.join("etc")] {
            std::fs::create_dir_all(path).expect("directory");
        }
        let link = |target: &str, at: PathBuf| std::os::unix::fs::symlink(target, at).expect("link");
        // A relative link through a link of another layer to a file of a third layer, and an absolute link.
        std::fs::write(low.join("usr/lib/passwd"), "low").expect("write");
        link("lib", middle.join("usr/share"));
        link("../usr/share/passwd", top.join("etc/passwd"));
        link("/etc/passwd", low.join("etc/group"));
        assert_eq!(topmost(&layers, "etc/passwd"), "low");
        assert_eq!(topmost(&layers, "etc/group"), "low");
        // A loop of links.
        link("b", top.join("etc/a"));
        link("a", low.join("etc/b"));
        assert_eq!(topmost(&layers, "etc/a"), "");
        // A path through a regular file.
        link("passwd/x", top.join("etc/x"));
        assert_eq!(topmost(&layers, "etc/x"), "");
        // An opaque directory hides lower layers. A directory that replaces another entry does not.
        std::fs::write(low.join("etc/shadow"), "hidden").expect("write");
        assert_eq!(topmost(&layers, "etc/shadow"), "hidden");
        if xattr::set(top.join("etc"), "trusted.overlay.opaque", b"y").is_ok() {
            assert_eq!(topmost(&layers, "etc/shadow"), "");
            assert_eq!(topmost(&layers, "etc/passwd"), "low");
        }
        // A directory that a file replaced.
        std::fs::write(middle.join("etc"), "").expect("write");
        assert_eq!(topmost(&layers[1..], "etc/shadow"), "");
    }

    /// The search of an image's files must not occupy a thread for minutes.
    #[test]
    fn account_files_behind_very_many_directories_are_not_searched() {
        let dir = tempfile::tempdir().expect("directory");
        let layers: Vec<PathBuf> = (0..100).map(|number| dir.path().join(number.to_string())).collect();
        for layer in &layers {
            std::fs::create_dir(layer).expect("directory");
        }
        let lowest = layers.last().expect("layer");
        for depth in [10, 300] {
            let place = vec![depth.to_string(); depth].join("/");
            std::fs::create_dir_all(lowest.join(&place)).expect("directory");
            std::fs::write(lowest.join(&place).join("passwd"), "found").expect("write");
            std::os::unix::fs::symlink(place + "/passwd", lowest.join(format!("to-{depth}"))).expect("link");
        }
        assert_eq!(topmost(&layers, "to-10"), "found");
        assert_eq!(topmost(&layers, "to-300"), "");
    }
}
