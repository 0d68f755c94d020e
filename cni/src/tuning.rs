//! The `tuning` plugin: sysctls of a sandbox's network and properties of its interface.
//!
//! Previous values are recorded before a change. DEL restores them, because the interface may survive the sandbox.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use rtnetlink::LinkUnspec;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::file::remove_file;
use crate::link::{Link, Links, format_mac, parse_mac};
use crate::netns::Netns;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;

/// The record of an interface's previous values. It names the network, because other implementations may use the same
/// directory.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Backup {
    network: String,
    #[serde(flatten)]
    before: Properties,
}

/// Properties to change. Also the type of previous values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Properties {
    mac: Option<String>,
    mtu: Option<u32>,
    promisc: Option<bool>,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    queue_length: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
#[derive(Default)]
struct Conf {
    data_dir: Option<PathBuf>,
    sysctl: BTreeMap<String, String>,
    mac: Option<String>,
    mtu: Option<u32>,
    promisc: Option<bool>,
    allmulti: Option<bool>,
    #[serde(rename = "txQLen")]
    queue_length: Option<u32>,
}

/// The checked configuration.
struct Tuning {
    backup: PathBuf,
    /// The temporary file of the record. Its content may be incomplete, so the name of the file contains the network.
    temporary: PathBuf,
    /// Paths below /proc/sys and their values.
    sysctl: Vec<(String, String)>,
    wanted: Properties,
}

/// Runs the request. ADD returns the previous result with the new properties.
pub(crate) async fn run(request: &Request) -> Result<Option<Answer>, Error> {
    let tuning = Tuning::of(request)?;
    match request.command {
        Command::Add => return tuning.add(request).await.map(Some),
        Command::Del => tuning.del(request).await?,
        Command::Check => tuning.check(request).await?,
        Command::Gc => tuning.collect(request)?,
        Command::Status | Command::Version => {}
    }
    Ok(None)
}

// === impl Tuning ===

impl Tuning {
    fn of(request: &Request) -> Result<Self, Error> {
        let conf: Conf = request.own()?;
        let mut sysctl = conf.sysctl;
        sysctl.extend(request.conf_arg::<BTreeMap<String, String>>("sysctl")?.unwrap_or_default());
        let by_env = request.env_arg("MAC").filter(|mac| !mac.is_empty()).map(str::to_owned);
        let mac = request.conf_arg("mac")?.or(request.capability("mac")?).or(by_env).or(conf.mac);
        let wanted = Properties {
            mac: mac.filter(|mac: &String| !mac.is_empty()),
            mtu: request.conf_arg("mtu")?.or(conf.mtu).filter(|mtu| *mtu != 0),
            promisc: request.conf_arg("promisc")?.or(conf.promisc),
            allmulti: request.conf_arg("allmulti")?.or(conf.allmulti),
            queue_length: request.conf_arg("txQLen")?.or(conf.queue_length),
        };
        if let Some(mac) = wanted.mac.as_deref().filter(|mac| parse_mac(mac).is_none()) {
            return Err(Error::invalid("mac", format!("{mac:?} is not a unicast hardware address")));
        }
        if let Some(mtu) = wanted.mtu.filter(|mtu| !(68..=65535).contains(mtu)) {
            return Err(Error::invalid("mtu", format!("{mtu} is not between 68 and 65535")));
        }
        // STATUS and GC do not concern a single interface.
        let ifname = if request.ifname.is_empty() { "lo" } else { &request.ifname };
        let sysctl = sysctl.into_iter().map(|(name, value)| Ok((path_of(&name, ifname)?, value)));
        let dir = conf.data_dir.filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or_else(|| "/run/cni/tuning".into());
        let name = name_of(&request.container_id, &request.ifname);
        let temporary = dir.join(format!("{}@{name}.new", request.network()));
        Ok(Self { backup: dir.join(name), temporary, sysctl: sysctl.collect::<Result<_, Error>>()?, wanted })
    }

    async fn add(&self, request: &Request) -> Result<Answer, Error> {
        let mut previous = request.chained()?;
        let netns = Netns::open(request.netns()?)?;
        netns.run(|| {
            let write =
                |(path, value): &(String, String)| std::fs::write(path, value).map_err(at("write", path));
            self.sysctl.iter().try_for_each(write)
        })??;
        coracle_fault::point("tuning.set");
        if self.wanted == Properties::default() {
            return Ok(previous);
        }
        let links = Links::inside(&netns)?;
        let link = links.get(&request.ifname).await?;
        self.record_previous(request.network(), &link)?;
        coracle_fault::point("tuning.noted");
        self.wanted.apply(&links, &link).await?;
        coracle_fault::point("tuning.tuned");
        for interface in
            previous.interfaces.iter_mut().filter(|i| i.name == request.ifname && !i.sandbox.is_empty())
        {
            if let Some(mac) = self.wanted.mac.as_deref().and_then(parse_mac) {
                interface.mac = format_mac(&mac);
            }
            interface.mtu = self.wanted.mtu.or(interface.mtu);
        }
        Ok(previous)
    }

    /// Records previous values. An existing record is kept: it has the original values.
    fn record_previous(&self, network: &str, link: &Link) -> Result<(), Error> {
        let failed = |source| Error::File { action: "write", path: self.backup.clone(), source };
        if self.backup.exists() {
            return Ok(());
        }
        let wanted = &self.wanted;
        let before = Properties {
            mac: wanted.mac.as_ref().map(|_| format_mac(&link.mac)),
            mtu: wanted.mtu.map(|_| link.mtu),
            promisc: wanted.promisc.map(|_| link.promiscuous),
            allmulti: wanted.allmulti.map(|_| link.all_multicast),
            queue_length: wanted.queue_length.map(|_| link.queue_length),
        };
        std::fs::create_dir_all(self.backup.parent().unwrap_or(&self.backup)).map_err(failed)?;
        let backup = Backup { network: network.to_owned(), before };
        let text = serde_json::to_vec(&backup).map_err(|error| failed(error.into()))?;
        std::fs::write(&self.temporary, text).map_err(failed)?;
        coracle_fault::point("tuning.written");
        std::fs::rename(&self.temporary, &self.backup).map_err(failed)
    }

    async fn del(&self, request: &Request) -> Result<(), Error> {
        remove_file(&self.temporary)?;
        let Ok(text) = std::fs::read(&self.backup) else { return Ok(()) };
        let Backup { before, .. } = serde_json::from_slice(&text).unwrap_or_default();
        // The namespace may be gone with the interface.
        if let Some(netns) = request.netns.as_deref().and_then(|path| Netns::open(path).ok()) {
            let links = Links::inside(&netns)?;
            if let Some(link) = links.find(&request.ifname).await? {
                before.apply(&links, &link).await?;
                coracle_fault::point("tuning.put-back");
            }
        }
        remove_file(&self.backup)
    }

    /// Removes records of the network's attachments that are not valid.
    fn collect(&self, request: &Request) -> Result<(), Error> {
        let valid = request.valid_attachments()?;
        let valid: HashSet<OsString> =
            valid.iter().map(|valid| name_of(&valid.container_id, &valid.ifname).into()).collect();
        let attachment_of_temporary = |name: &str| {
            let of = name.strip_prefix(request.network())?.strip_prefix('@')?.strip_suffix(".new")?;
            Some(OsString::from(of))
        };
        let entries = self.backup.parent().and_then(|dir| std::fs::read_dir(dir).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let path = entry.path();
            if let Some(of) = entry.file_name().to_str().and_then(attachment_of_temporary) {
                if !valid.contains(&of) {
                    remove_file(&path)?;
                }
                continue;
            }
            if valid.contains(&entry.file_name())
                || path.extension().is_none_or(|extension| extension != "json")
            {
                continue;
            }
            let text = std::fs::read(&path).unwrap_or_default();
            let of = serde_json::from_slice::<Backup>(&text).ok().map(|backup| backup.network);
            if of.as_deref() == Some(request.network()) {
                remove_file(&path)?;
            }
        }
        Ok(())
    }

    async fn check(&self, request: &Request) -> Result<(), Error> {
        let netns = Netns::open(request.netns()?)?;
        let changed = |what: &str, reason: String| Error::Changed { what: what.to_owned(), reason };
        let read = |path: &String| std::fs::read_to_string(path).map_err(at("read", path));
        let values = netns
            .run(|| self.sysctl.iter().map(|(path, _)| read(path)).collect::<Result<Vec<_>, Error>>())??;
        for ((path, wanted), value) in self.sysctl.iter().zip(values) {
            let same = value.split_whitespace().eq(wanted.split_whitespace());
            if !same {
                return Err(changed(path, format!("it is {}, not {wanted}", value.trim())));
            }
        }
        let link = Links::inside(&netns)?.get(&request.ifname).await?;
        let wanted = &self.wanted;
        let mac = wanted.mac.as_deref().and_then(parse_mac);
        let as_wanted = mac.is_none_or(|mac| link.mac == mac)
            && wanted.mtu.is_none_or(|mtu| link.mtu == mtu)
            && wanted.promisc.is_none_or(|on| link.promiscuous == on)
            && wanted.allmulti.is_none_or(|on| link.all_multicast == on)
            && wanted.queue_length.is_none_or(|length| link.queue_length == length);
        if as_wanted { Ok(()) } else { Err(changed(&request.ifname, format!("it is {link:?}"))) }
    }
}

// === impl Properties ===

impl Properties {
    async fn apply(&self, links: &Links, link: &Link) -> Result<(), Error> {
        let mut change = LinkUnspec::new_with_index(link.index);
        if let Some(mac) = self.mac.as_deref().and_then(parse_mac) {
            change = change.address(mac.to_vec());
        }
        if let Some(mtu) = self.mtu {
            change = change.mtu(mtu);
        }
        if let Some(on) = self.promisc {
            change = change.promiscuous(on);
        }
        if let Some(on) = self.allmulti {
            change = change.allmulticast(on);
        }
        if let Some(length) = self.queue_length {
            change = change.txqueuelen(length);
        }
        links.change(change, "tune", &link.name).await
    }
}

/// Name of an attachment's record.
fn name_of(id: &str, ifname: &str) -> String {
    format!("{id}_{ifname}.json")
}

/// The file of a sysctl, which must belong to the network. `IFNAME` is replaced by the interface's name.
fn path_of(name: &str, ifname: &str) -> Result<String, Error> {
    let wrong = |reason: &str| Error::invalid(&format!("sysctl.{name}"), reason);
    let path = if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    let path = path.replace("IFNAME", ifname);
    if !path.starts_with("net/") || path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(wrong("is not a parameter of a network namespace"));
    }
    Ok(format!("/proc/sys/{path}"))
}

/// Adds the file's path to an error.
fn at(action: &'static str, path: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::File { action, path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parameters_of_the_network_are_written() {
        assert_eq!(path_of("net.core.somaxconn", "eth0").unwrap(), "/proc/sys/net/core/somaxconn");
        let of_interface = path_of("net/ipv4/conf/IFNAME/arp_filter", "eth0.1").unwrap();
        assert_eq!(of_interface, "/proc/sys/net/ipv4/conf/eth0.1/arp_filter");
        for wrong in ["kernel.hostname", "net", "net/../kernel/hostname", "net..x", ""] {
            assert!(path_of(wrong, "eth0").is_err(), "{wrong}");
        }
    }
}
