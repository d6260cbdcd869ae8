//! [`ReplicaRecord`]: a record of the arrays that a rank took as replicated, by which ranks notice that they passed different values.

use std::borrow::Cow;
use std::fmt;
use std::hash::Hasher;

use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::drawn::mix;
use crate::site::Site;
use dtensor_array::{Array, Meta};

/// An array that a rank took as replicated, which means that it must be equal on all ranks of a group.
///
/// It contains a hash of the values, not the values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Replica {
    /// The function or the parallel style that took it.
    pub by: Cow<'static, str>,
    /// The argument of that function, or the input of the module.
    pub argument: String,
    /// Shape and dtype.
    pub meta: Meta,
    /// A hash of the bits of all elements.
    pub hash: u64,
    /// The source line that passed it, and the module.
    pub at: Site,
}

impl Replica {
    /// Describes an array and hashes its elements.
    pub fn new(by: &'static str, argument: String, x: &Array, at: Site) -> Result<Self> {
        let mut hasher = FxHasher::default();
        hasher.write(x.copy_to_host_memory()?.bytes());
        Ok(Replica { by: by.into(), argument, meta: x.meta(), hash: hasher.finish(), at })
    }

    /// Returns a hash of elements, shape and dtype.
    fn digest(&self) -> u64 {
        let Meta { shape, dtype, .. } = &self.meta;
        let digest = mix(mix(self.hash, *dtype as u64), shape.ndim() as u64);
        shape.iter().fold(digest, |digest, &size| mix(digest, size as u64))
    }

    /// Returns about how many bytes a message needs for it.
    fn message_len(&self) -> usize {
        let Replica { by, argument, meta, at, .. } = self;
        let module = at.module.as_ref().map_or(0, |module| module.len());
        200 + by.len() + argument.len() + at.file.len() + module + 20 * meta.shape.ndim()
    }
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Replica { by, argument, meta, hash, at } = self;
        write!(f, "`{argument}` of {by} ({} {} with hash {hash:016x}, at {at})", meta.dtype, meta.shape)
    }
}

/// A record of the arrays that a rank took as replicated over a group since its last collective there: the first ones, their number,
/// and a digest of all of them.
///
/// The next collective carries it, so ranks that passed different values get an error that shows the first difference.
///
/// ```
/// use dtensor_array::Array;
/// use dtensor_comm::{Replica, ReplicaRecord, Site};
/// # fn main() -> dtensor_comm::Result<()> {
/// let x = Array::from_vec(vec![1f32, 2.], &[2])?;
/// let y = Array::from_vec(vec![1f32, 3.], &[2])?;
/// let x = Replica::new("f", "x".into(), &x, Site::caller())?;
/// let y = Replica::new("f", "x".into(), &y, Site::caller())?;
/// let record = ReplicaRecord::new();
/// assert!(record.clone().and(&x).matches(&record.clone().and(&x)));
/// assert!(!record.clone().and(&x).matches(&record.and(&y)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaRecord {
    first: Vec<Replica>,
    count: u64,
    digest: u64,
}

impl ReplicaRecord {
    /// How many replicas errors can show.
    const LISTED: usize = 4;
    /// The longest replica that is listed. Over MPI, the record is part of a message of limited length.
    const LONGEST: usize = 640;

    /// Creates a record without replicas.
    pub const fn new() -> Self {
        ReplicaRecord { first: Vec::new(), count: 0, digest: 0 }
    }

    /// Returns the record with one more replica.
    pub fn and(mut self, replica: &Replica) -> ReplicaRecord {
        let is_prefix = self.first.len() as u64 == self.count;
        if is_prefix && self.first.len() < Self::LISTED && replica.message_len() <= Self::LONGEST {
            self.first.push(replica.clone());
        }
        let digest = mix(self.digest, replica.digest());
        ReplicaRecord { count: self.count.wrapping_add(1), digest, ..self }
    }

    /// Returns true if both ranks took equal arrays in the same order.
    pub fn matches(&self, other: &ReplicaRecord) -> bool {
        (self.count, self.digest) == (other.count, other.digest)
    }

    /// Returns the first replicas that differ. `None` if one record has no more of them, or does not list them.
    fn first_difference<'r>(
        &'r self,
        other: &'r ReplicaRecord,
    ) -> (Option<&'r Replica>, Option<&'r Replica>) {
        let same = self.first.iter().zip(&other.first).take_while(|(x, y)| x.digest() == y.digest()).count();
        (self.first.get(same), other.first.get(same))
    }

    /// Returns true if both ranks took an array at the first difference.
    pub(crate) fn differs_in_values(&self, other: &ReplicaRecord) -> bool {
        matches!(self.first_difference(other), (Some(_), Some(_)))
    }

    /// Writes the first difference between the records of two ranks.
    pub(crate) fn write_difference(
        f: &mut fmt::Formatter<'_>,
        one: (usize, &ReplicaRecord),
        other: (usize, &ReplicaRecord),
    ) -> fmt::Result {
        let (x, y) = one.1.first_difference(other.1);
        if let (None, None, Some(last)) = (x, y, one.1.first.last()) {
            return write!(f, "ranks {} and {} differ in one that was passed after {last}", one.0, other.0);
        }
        for (separator, (rank, record), x) in [("", one, x), (", and ", other, y)] {
            match x {
                Some(x) => write!(f, "{separator}rank {rank} passed {x}")?,
                None => write!(
                    f,
                    "{separator}rank {rank} passed only {} since the last collective",
                    record.count
                )?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn replica(x: &Array) -> Replica {
        Replica::new("from_local", "local".into(), x, Site::caller()).unwrap()
    }

    fn difference(one: &ReplicaRecord, other: &ReplicaRecord) -> String {
        struct Difference<'r>(&'r ReplicaRecord, &'r ReplicaRecord);
        impl fmt::Display for Difference<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                ReplicaRecord::write_difference(f, (0, self.0), (1, self.1))
            }
        }
        Difference(one, other).to_string()
    }

    #[test]
    fn a_replica_is_its_elements_shape_and_dtype() -> std::result::Result<(), Error> {
        let x = Array::from_vec(vec![1f32, f32::NAN, -0.0, 4.], &[2, 2])?;
        let same = Array::from_vec(vec![1f32, -0.0, f32::NAN, 4.], &[2, 2])?.transpose(0, 1)?;
        assert_eq!(replica(&x).digest(), replica(&same).digest());
        let others = [
            Array::from_vec(vec![1f32, f32::NAN, 0.0, 4.], &[2, 2])?,
            Array::from_vec(vec![-1f32, f32::NAN, -0.0, -4.], &[2, 2])?,
            Array::from_vec(vec![1f32, f32::NAN, -0.0, 4.], &[4, 1])?,
            Array::from_vec(vec![0f32; 0], &[0, 2])?,
            Array::from_vec(vec![0f32; 0], &[0, 3])?,
            Array::from_vec(vec![0f64; 0], &[0, 2])?,
            Array::from_vec(vec![0i64], &[])?,
            Array::from_vec(vec![0f64], &[])?,
        ];
        let mut digests: Vec<u64> = others.iter().chain([&x]).map(|x| replica(x).digest()).collect();
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), others.len() + 1);
        Ok(())
    }

    #[test]
    fn records_compare_all_replicas_and_list_the_first() -> std::result::Result<(), Error> {
        let number = |x: i64| Ok::<_, Error>(replica(&Array::from_vec(vec![x], &[])?));
        let of = |list: &[i64]| -> std::result::Result<ReplicaRecord, Error> {
            list.iter().try_fold(ReplicaRecord::new(), |record, &x| Ok(record.and(&number(x)?)))
        };
        assert!(of(&[1, 2])?.matches(&of(&[1, 2])?));
        assert!(!of(&[1, 2])?.matches(&of(&[2, 1])?));
        assert!(!of(&[1, 2])?.matches(&of(&[1])?));
        let text = difference(&of(&[1, 2, 3])?, &of(&[1, 7, 3])?);
        let shown = |x: i64| Ok::<_, Error>(format!("{:016x}", number(x)?.hash));
        assert!(
            text.contains(&shown(2)?) && text.contains(&shown(7)?) && !text.contains(&shown(1)?),
            "{text}"
        );
        let text = difference(&of(&[1, 2])?, &of(&[1])?);
        assert!(text.contains("rank 1 passed only 1 since the last collective"), "{text}");
        let text = difference(&of(&[1, 2, 3, 4, 5])?, &of(&[1, 2, 3, 4, 6])?);
        assert!(text.contains("ranks 0 and 1 differ in one that was passed after"), "{text}");
        // A text that is too long for a message is not listed, and neither are later replicas: the list is a prefix.
        let long = Replica { argument: "x".repeat(ReplicaRecord::LONGEST), ..number(1)? };
        assert_eq!(of(&[1])?.and(&long).and(&number(2)?).first.len(), 1);
        Ok(())
    }
}
