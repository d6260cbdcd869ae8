//! [`Value`]: what collectives take and give.

use dtensor_array::kernels::cat::cat;
use dtensor_array::{Array, Meta, Shape};

use crate::{Collective, Error, Group, Result, Site};

/// Turns what arrived of a collective into a value; nothing arrives for values without data.
pub type Finish<V> = Box<dyn FnOnce(Option<Array>) -> Result<V> + Send>;

/// What collectives take and give: an [`Array`], or a type of another crate that holds one and, say, records gradients.
pub trait Value: Clone + Send + 'static {
    /// Shape, dtype and device.
    fn meta(&self) -> Meta;

    /// Returns the array to move, or nothing for a value without data. Returns an error in the name of `op` if the value cannot
    /// be moved.
    fn array(&self, op: &'static str) -> Result<Option<Array>>;

    /// Returns the value of an array that arrived.
    fn from_array(array: Array) -> Self;

    /// Returns an error if the result of `op`, through which no gradient passes, would lose one.
    fn check_constant(&self, op: &'static str) -> Result<()> {
        let _ = op;
        Ok(())
    }

    /// Returns true if this value requires a gradient.
    fn requires_grad(&self) -> bool {
        false
    }

    /// Called when a collective with one output begins: returns what is to be done with its result.
    #[track_caller]
    fn finish(&self, group: &Group, collective: &Collective, at: &Site) -> Finish<Self>;

    /// Reshapes each value to `rows` rows and concatenates them along the columns.
    #[track_caller]
    fn join(values: &[&Self], rows: usize) -> Result<Self>;

    /// Splits such a matrix by `columns` and reshapes the pieces to `shapes`; `given` are the values that were joined.
    #[track_caller]
    fn split(self, columns: &[usize], shapes: &[Shape], given: &[Self]) -> Result<Vec<Self>>;
}

impl Value for Array {
    fn meta(&self) -> Meta {
        Array::meta(self)
    }

    fn array(&self, _: &'static str) -> Result<Option<Array>> {
        Ok(Some(self.clone()))
    }

    fn from_array(array: Array) -> Self {
        array
    }

    fn finish(&self, _: &Group, collective: &Collective, _: &Site) -> Finish<Self> {
        let op = collective.name();
        Box::new(move |array| {
            array.ok_or_else(|| Error::argument(op, "the collective gave this rank no value"))
        })
    }

    fn join(values: &[&Self], rows: usize) -> Result<Self> {
        let matrix = |x: &&Array| x.reshape(&[rows, x.numel() / rows]);
        let matrices: Vec<Array> = values.iter().map(matrix).collect::<Result<_>>()?;
        cat(&matrices.iter().collect::<Vec<_>>(), 1)
    }

    fn split(self, columns: &[usize], shapes: &[Shape], _: &[Self]) -> Result<Vec<Self>> {
        let mut start = 0;
        let part = |(&n, shape): (&usize, &Shape)| {
            start += n;
            self.narrow(1, start - n, n)?.reshape(shape)
        };
        columns.iter().zip(shapes).map(part).collect()
    }
}
