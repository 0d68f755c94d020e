//! The `host-local` plugin: addresses from ranges. One file per address, in the layout of the reference plugin, so
//! that users can migrate and both plugins may share a directory.
//!
//! The files are derived state: GC keeps the files of valid attachments, and [`restore`] recreates them from the
//! addresses in use.

pub(crate) mod range;
mod resolver;

use std::net::IpAddr;
use std::path::PathBuf;

use ipnetwork::IpNetwork;
use serde::Deserialize;
use serde_json::Value;

use crate::address_store::{Owner, Store};
use crate::attachment_cache::Cache;
use crate::error::Error;
use crate::host::Host;
use crate::spec::Command;
use crate::spec::request::{Request, from_value};
use crate::spec::result::{Answer, Ip, Route};
use range::{RangeConf, RangeSet};

const DATA_DIR: &str = "/var/lib/cni/networks";

/// The key `ipam` of a network configuration.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Conf {
    #[serde(rename = "type")]
    _type: String,
    subnet: Option<IpNetwork>,
    range_start: Option<IpAddr>,
    range_end: Option<IpAddr>,
    gateway: Option<IpAddr>,
    #[serde(default)]
    ranges: Vec<Vec<RangeConf>>,
    #[serde(default)]
    routes: Vec<Route>,
    data_dir: Option<PathBuf>,
    resolv_conf: Option<PathBuf>,
}

/// The checked configuration.
struct Ipam {
    sets: Vec<RangeSet>,
    routes: Vec<Route>,
    dir: PathBuf,
    resolv_conf: Option<PathBuf>,
}

/// Runs the request. ADD allocates one address of each range set.
pub(crate) fn run(host: &Host, request: &Request) -> Result<Option<Answer>, Error> {
    let ipam = Ipam::of(request)?;
    let owner = Owner { id: request.container_id.clone(), ifname: request.ifname.clone() };
    match request.command {
        Command::Add => return ipam.add(request, &owner, host.attachments.as_deref()).map(Some),
        Command::Del => ipam.del(request, &owner, host.attachments.as_deref())?,
        Command::Check => {
            if Store::open(&ipam.dir)?.addresses_of(&owner)?.is_empty() {
                let what = format!("the address of {} {}", owner.id, owner.ifname);
                return Err(Error::Changed { what, reason: "the attachment has no address".to_owned() });
            }
        }
        Command::Status => ipam.status()?,
        Command::Gc => {
            let valid = request.valid_attachments()?;
            Store::open(&ipam.dir)?.retain(|owner| {
                let same = |v: &&crate::spec::request::Valid| owner.is(&v.container_id, &v.ifname);
                valid.iter().any(|v| same(&v))
            })?;
        }
        Command::Version => {}
    }
    Ok(None)
}

/// Restores the file of an attachment's address. Returns false if the address is in no range of this configuration.
pub(crate) fn restore(request: &Request, address: IpAddr) -> Result<bool, Error> {
    let ipam = Ipam::of(request)?;
    if !ipam.sets.iter().any(|set| set.contains(address)) {
        return Ok(false);
    }
    let owner = Owner { id: request.container_id.clone(), ifname: request.ifname.clone() };
    let mut store = Store::open(&ipam.dir)?;
    match store.owner_of(address)? {
        Some(holder) if holder == owner => Ok(true),
        Some(holder) => Err(Error::AddressTaken { address, owner: holder.id }),
        None => store.take(&owner, &mut std::iter::once(address)).map(|taken| taken.is_some()),
    }
}

/// Checks that an ADD would assign the requested addresses now.
pub(crate) fn check_assignable(host: &Host, request: &Request) -> Result<(), Error> {
    let (ipam, wanted) = (Ipam::of(request)?, requested(request)?);
    let choices = ipam.assign(wanted)?;
    if choices.iter().all(Option::is_none) {
        return Ok(());
    }
    let mut store = Store::open(&ipam.dir)?;
    if let Some(attachments) = host.attachments.as_deref() {
        ipam.restore_missing(&mut store, request.network(), attachments)?;
    }
    for address in choices.into_iter().flatten() {
        if let Some(holder) = store.owner_of(address)? {
            return Err(Error::AddressTaken { address, owner: holder.id });
        }
    }
    Ok(())
}

// === impl Ipam ===

impl Ipam {
    fn of(request: &Request) -> Result<Self, Error> {
        let value = request.conf.get("ipam").ok_or_else(|| Error::invalid("ipam", "is missing"))?;
        check_routes(value)?;
        let conf: Conf = from_value(value.clone(), "ipam")?;
        let mut ranges = conf.ranges;
        match conf.subnet {
            Some(subnet) => {
                let (range_start, range_end, gateway) = (conf.range_start, conf.range_end, conf.gateway);
                ranges.insert(0, vec![RangeConf { subnet, range_start, range_end, gateway }]);
            }
            None => {
                let stray = [
                    ("ipam.rangeStart", conf.range_start),
                    ("ipam.rangeEnd", conf.range_end),
                    ("ipam.gateway", conf.gateway),
                ];
                if let Some((field, _)) = stray.iter().find(|(_, value)| value.is_some()) {
                    return Err(Error::invalid(field, "needs ipam.subnet"));
                }
            }
        }
        let given: Option<Vec<Vec<RangeConf>>> = request.capability("ipRanges")?;
        let ranges = given.into_iter().flatten().chain(ranges);
        let sets = ranges
            .enumerate()
            .map(|(index, set)| RangeSet::new(index, set))
            .collect::<Result<Vec<_>, _>>()?;
        range::check_overlaps(&sets)?;
        let dir = conf.data_dir.filter(|dir| !dir.as_os_str().is_empty());
        let dir = dir.unwrap_or_else(|| DATA_DIR.into()).join(request.network());
        let resolv_conf = conf.resolv_conf.filter(|path| !path.as_os_str().is_empty());
        Ok(Self { sets, routes: conf.routes, dir, resolv_conf })
    }

    /// Allocates an address of each set. `attachments` are the records of a runtime. Files that another program deleted
    /// are first restored from these records. Without records, an owner that already has an address is refused.
    fn add(&self, request: &Request, owner: &Owner, attachments: Option<&Cache>) -> Result<Answer, Error> {
        let dns = self.resolv_conf.as_deref().map(resolver::read).transpose()?.unwrap_or_default();
        let choices = self.assign(requested(request)?)?;
        let mut store = Store::open(&self.dir)?;
        match attachments {
            // The directory is listed only if another process changed it since our last change.
            Some(attachments) if attachments.is_complete(&self.dir, store.version()) => {}
            Some(attachments) => self.restore_missing(&mut store, request.network(), attachments)?,
            None => {
                if let Some(address) = store.addresses_of(owner)?.first() {
                    return Err(Error::AddressTaken { address: *address, owner: owner.id.clone() });
                }
            }
        }
        let mut ips = Vec::with_capacity(self.sets.len());
        let taken = self.take(&mut store, owner, &choices, &mut ips);
        if taken.is_err() {
            for ip in &ips {
                store.free(ip.address.ip())?;
            }
        }
        if let Some(attachments) = attachments {
            attachments.completed(&self.dir, store.version());
        }
        taken?;
        Ok(Answer { interfaces: Vec::new(), ips, routes: self.routes.clone(), dns })
    }

    /// Restores missing files of the attachments' addresses.
    fn restore_missing(&self, store: &mut Store, network: &str, attachments: &Cache) -> Result<(), Error> {
        for (address, owner) in attachments.missing(network, &store.addresses()?) {
            if self.sets.iter().any(|set| set.contains(address)) {
                store.take(&owner, &mut std::iter::once(address))?;
            }
        }
        Ok(())
    }

    /// The requested address for each set, if any.
    fn assign(&self, mut wanted: Vec<IpAddr>) -> Result<Vec<Option<IpAddr>>, Error> {
        let mut choices = Vec::with_capacity(self.sets.len());
        for set in &self.sets {
            let at = wanted.iter().position(|address| set.contains(*address));
            let address = at.map(|at| wanted.remove(at));
            address.map_or(Ok(()), |address| set.check_requested(address))?;
            choices.push(address);
        }
        let Some(left) = wanted.first() else { return Ok(choices) };
        let reason = match self.sets.iter().find(|set| set.contains(*left)) {
            Some(set) => {
                format!("{left} is the second requested address of {set}, which assigns one address")
            }
            None => {
                let sets: Vec<String> = self.sets.iter().map(RangeSet::to_string).collect();
                format!("{left} is in no range of the network: {}", sets.join(" and "))
            }
        };
        Err(Error::invalid("ips", reason))
    }

    /// Allocates one address of each set: the requested address, or the next free address.
    fn take(
        &self,
        store: &mut Store,
        owner: &Owner,
        choices: &[Option<IpAddr>],
        ips: &mut Vec<Ip>,
    ) -> Result<(), Error> {
        for (index, (set, choice)) in self.sets.iter().zip(choices).enumerate() {
            let address = match *choice {
                Some(address) => {
                    if store.take(owner, &mut std::iter::once(address))?.is_none() {
                        let holder = store.owner_of(address)?.map_or_else(String::new, |holder| holder.id);
                        return Err(Error::AddressTaken { address, owner: holder });
                    }
                    address
                }
                None => {
                    let after = store.last(index);
                    let full = || Error::RangeFull { range: set.to_string(), size: set.size() };
                    store.take(owner, &mut set.candidates(after))?.ok_or_else(full)?
                }
            };
            store.set_last(index, address)?;
            ips.push(set.config(address));
        }
        Ok(())
    }

    /// Frees the addresses of the attachment. If the result of its ADD has an address of each set, the attachment has
    /// no other addresses. Otherwise the directory of addresses is searched.
    fn del(&self, request: &Request, owner: &Owner, attachments: Option<&Cache>) -> Result<(), Error> {
        let Some(mut store) = Store::existing(&self.dir)? else { return Ok(()) };
        let is_complete = |attachments: &&Cache| attachments.is_complete(&self.dir, store.version());
        let attachments = attachments.filter(is_complete);
        let answered: Vec<IpAddr> = match request.previous()? {
            Some(answer) => answer.addresses_of(&request.ifname).map(|ip| ip.address.ip()).collect(),
            None => Vec::new(),
        };
        let complete = self.sets.iter().all(|set| answered.iter().any(|address| set.contains(*address)));
        let allocated = if complete { answered } else { store.addresses_of(owner)? };
        for address in allocated {
            if store.owner_of(address)?.is_some_and(|holder| holder.is(&owner.id, &owner.ifname)) {
                store.free(address)?;
            }
        }
        if let Some(attachments) = attachments {
            attachments.completed(&self.dir, store.version());
        }
        Ok(())
    }

    /// Checks that each set has a free address.
    fn status(&self) -> Result<(), Error> {
        let store = Store::open(&self.dir)?;
        let allocated = store.allocated()?;
        for set in &self.sets {
            let used = allocated.iter().filter(|(address, _)| set.contains(*address)).count();
            if used as u128 >= set.size() {
                return Err(Error::RangeFull { range: set.to_string(), size: set.size() });
            }
        }
        Ok(())
    }
}

/// Refuses unknown fields in the routes of a configuration. The routes of a result may have unknown fields.
fn check_routes(ipam: &Value) -> Result<(), Error> {
    let routes = ipam.get("routes").and_then(Value::as_array).into_iter().flatten();
    let mut fields = routes.filter_map(Value::as_object).flatten();
    match fields.find(|(field, _)| !Route::FIELDS.contains(&field.as_str())) {
        Some((field, value)) => Err(Error::unsupported(&format!("ipam.{field}"), value)),
        None => Ok(()),
    }
}

/// The requested addresses: from `CNI_ARGS`, from `args`, and from the capability.
pub(crate) fn requested(request: &Request) -> Result<Vec<IpAddr>, Error> {
    let parse = |field: &'static str| {
        move |text: String| {
            let host = text.split_once('/').map_or(text.as_str(), |(host, _)| host);
            host.parse::<IpAddr>()
                .map_err(|_not| Error::invalid(field, format!("{text:?} is not an address")))
        }
    };
    let mut wanted = Vec::new();
    if let Some(text) = request.env_arg("IP").filter(|text| !text.is_empty()) {
        wanted.push(parse("CNI_ARGS IP")(text.to_owned())?);
    }
    let by_args: Vec<String> = request.conf_arg("ips")?.unwrap_or_default();
    for text in by_args {
        wanted.push(parse("args.cni.ips")(text)?);
    }
    let by_capability: Option<Value> = request.capability("ips")?;
    let by_capability: Vec<String> =
        by_capability.map(|value| from_value(value, "runtimeConfig.ips")).transpose()?.unwrap_or_default();
    for text in by_capability {
        wanted.push(parse("runtimeConfig.ips")(text)?);
    }
    wanted.sort_unstable();
    wanted.dedup();
    Ok(wanted)
}

#[cfg(test)]
mod tests;
