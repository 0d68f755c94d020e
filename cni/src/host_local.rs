//! Addresses out of ranges (`host-local`): one file per address, named as the address, in the layout of the
//! plugin of that name, so that its users can move over and both may even run side by side.
//!
//! The files are derived state: GC keeps those of valid attachments, and [`restore`] makes them again from the
//! addresses that live.

pub(crate) mod range;
mod resolver;
pub(crate) mod store;

use std::net::IpAddr;
use std::path::PathBuf;

use ipnetwork::IpNetwork;
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::host::Host;
use crate::invoke::cache::Cache;
use crate::spec::Command;
use crate::spec::request::{Request, from_value};
use crate::spec::result::{Answer, Ip, Route};
use range::{RangeConf, RangeSet};
use store::{Owner, Store};

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

/// The configuration, decided.
struct Ipam {
    sets: Vec<RangeSet>,
    routes: Vec<Route>,
    dir: PathBuf,
    resolv_conf: Option<PathBuf>,
}

/// Does what the request asks; for ADD, one address of each range set.
pub(crate) fn run(host: &Host, request: &Request) -> Result<Option<Answer>, Error> {
    let ipam = Ipam::of(request)?;
    let owner = Owner { id: request.container_id.clone(), ifname: request.ifname.clone() };
    match request.command {
        Command::Add => return ipam.add(request, &owner, host.attachments.as_deref()).map(Some),
        Command::Del => ipam.del(request, &owner, host.attachments.as_deref())?,
        Command::Check => {
            if Store::open(&ipam.dir)?.held_by(&owner)?.is_empty() {
                let what = format!("the address of {} {}", owner.id, owner.ifname);
                return Err(Error::Changed { what, reason: "it holds none".to_owned() });
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

/// Makes the file of an address that an attachment has in truth. False when the address is of no range here.
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

/// Refuses addresses that are asked for and that an ADD would not get now.
pub(crate) fn would_give(host: &Host, request: &Request) -> Result<(), Error> {
    let (ipam, wanted) = (Ipam::of(request)?, requested(request)?);
    let choices = ipam.assign(wanted)?;
    if choices.iter().all(Option::is_none) {
        return Ok(());
    }
    let mut store = Store::open(&ipam.dir)?;
    if let Some(attachments) = host.attachments.as_deref() {
        ipam.complete(&mut store, request.network(), attachments)?;
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
        let told: Option<Vec<Vec<RangeConf>>> = request.capability("ipRanges")?;
        let ranges = told.into_iter().flatten().chain(ranges);
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

    /// Gives an address of each set. A runtime knows who has which: files that somebody deleted are made again first,
    /// and nobody is added twice.
    fn add(&self, request: &Request, owner: &Owner, attachments: Option<&Cache>) -> Result<Answer, Error> {
        let dns = self.resolv_conf.as_deref().map(resolver::read).transpose()?.unwrap_or_default();
        let choices = self.assign(requested(request)?)?;
        let mut store = Store::open(&self.dir)?;
        match attachments {
            // The directory is listed only if another process changed it since our last change.
            Some(attachments) if attachments.is_complete(&self.dir, store.version()) => {}
            Some(attachments) => self.complete(&mut store, request.network(), attachments)?,
            None => {
                if let Some(address) = store.held_by(owner)?.first() {
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

    /// Makes the files of the addresses that attachments have and that no file says.
    fn complete(&self, store: &mut Store, network: &str, attachments: &Cache) -> Result<(), Error> {
        for (address, owner) in attachments.missing(network, &store.addresses()?) {
            if self.sets.iter().any(|set| set.contains(address)) {
                store.take(&owner, &mut std::iter::once(address))?;
            }
        }
        Ok(())
    }

    /// Which of the addresses that are asked for each set is to give.
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
            Some(set) => format!("{left} is asked for beside another address of {set}, which gives one"),
            None => {
                let sets: Vec<String> = self.sets.iter().map(RangeSet::to_string).collect();
                format!("{left} is of no range: there is {}", sets.join(" and "))
            }
        };
        Err(Error::invalid("ips", reason))
    }

    /// One address from each set: the one that was chosen, or the next that is free.
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

    /// Frees what the attachment holds: at once what its ADD answered when that is one of each set, as it is
    /// when it ended well; otherwise whatever is found.
    fn del(&self, request: &Request, owner: &Owner, attachments: Option<&Cache>) -> Result<(), Error> {
        let Some(mut store) = Store::existing(&self.dir)? else { return Ok(()) };
        let is_complete = |attachments: &&Cache| attachments.is_complete(&self.dir, store.version());
        let attachments = attachments.filter(is_complete);
        let answered: Vec<IpAddr> = match request.previous()? {
            Some(answer) => answer.addresses_of(&request.ifname).map(|ip| ip.address.ip()).collect(),
            None => Vec::new(),
        };
        let complete = self.sets.iter().all(|set| answered.iter().any(|address| set.contains(*address)));
        let held = if complete { answered } else { store.held_by(owner)? };
        for address in held {
            if store.owner_of(address)?.is_some_and(|holder| holder.is(&owner.id, &owner.ifname)) {
                store.free(address)?;
            }
        }
        if let Some(attachments) = attachments {
            attachments.completed(&self.dir, store.version());
        }
        Ok(())
    }

    /// Whether each set still has an address.
    fn status(&self) -> Result<(), Error> {
        let store = Store::open(&self.dir)?;
        let held = store.held()?;
        for set in &self.sets {
            let used = held.iter().filter(|(address, _)| set.contains(*address)).count();
            if used as u128 >= set.size() {
                return Err(Error::RangeFull { range: set.to_string(), size: set.size() });
            }
        }
        Ok(())
    }
}

/// Refuses what is not known of a configuration's routes; results may have it.
fn check_routes(ipam: &Value) -> Result<(), Error> {
    let routes = ipam.get("routes").and_then(Value::as_array).into_iter().flatten();
    let mut fields = routes.filter_map(Value::as_object).flatten();
    match fields.find(|(field, _)| !Route::FIELDS.contains(&field.as_str())) {
        Some((field, value)) => Err(Error::unsupported(&format!("ipam.{field}"), value)),
        None => Ok(()),
    }
}

/// The addresses that the caller asks for: by `CNI_ARGS`, by `args`, by capability.
fn requested(request: &Request) -> Result<Vec<IpAddr>, Error> {
    let parse = |field: &'static str| {
        move |text: String| {
            let host = text.split_once('/').map_or(text.as_str(), |(host, _)| host);
            host.parse::<IpAddr>().map_err(|_not| Error::invalid(field, format!("{text:?} is no address")))
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
